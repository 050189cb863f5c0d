"""Keeps an address announced in etcd for as long as its process lives."""

import logging
import threading

from common.discovery.etcd import EtcdError, EtcdStore

log = logging.getLogger(__name__)

#: An announcement vanishes so long after its process has died.
TTL_S = 10
RENEWAL_S, RETRY_S = TTL_S / 4, 1.0
#: The folder of gateways' control addresses below the prefix.
GATEWAYS = "gateways"


class Announcement:
    """Announces ``address`` as that of a gateway, from a thread, until ``close``.

    etcd may be away for any time: the announcement is renewed, or made again, as soon as it is back.
    """

    def __init__(self, store: EtcdStore, address: str) -> None:
        self._store = store
        self._address = address
        self._lease: int | None = None
        self._is_failing = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="announcement", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take the announcement back; waits for a call under way, and for at most one more."""
        self._stopped.set()
        self._thread.join()
        if self._lease is not None:
            try:
                self._store.revoke(self._lease)
            except EtcdError as error:
                log.warning("etcd keeps the announcement of %s for up to %d s: %s", self._address, TTL_S, error)

    def _run(self) -> None:
        delay_s = 0.0
        while not self._stopped.wait(delay_s):
            try:
                self._announce()
                delay_s = RENEWAL_S
            except EtcdError as error:
                if not self._is_failing:
                    log.warning("cannot announce %s in etcd, trying again: %s", self._address, error)
                self._is_failing = True
                delay_s = RETRY_S

    def _announce(self) -> None:
        if self._lease is not None and self._store.renew(self._lease):
            if self._is_failing:
                log.info("etcd answers again")
            self._is_failing = False
            return
        self._lease = self._store.put(GATEWAYS, self._address, self._address, ttl_s=TTL_S)
        self._is_failing = False
        log.info("announced %s in etcd", self._address)

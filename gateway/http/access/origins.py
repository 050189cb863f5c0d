"""Which web pages may send requests that change something.

A browser sends such a request for any page, with the headers ``Origin`` and ``Sec-Fetch-Site``, and only keeps the
answer from a page of another site. Clients that are no browsers send neither header.
"""

from collections.abc import Iterable, Mapping

from common.errors import ErrorCode, RequestError

#: Methods that change nothing.
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
#: Values of ``Sec-Fetch-Site`` for the gateway's own page, and for what the user does without any page.
_OWN = ("same-origin", "none")


class AllowedOrigins:
    """The origins whose pages may call the API from a browser.

    Args:
        origins: such as ``https://example.com``; ``*`` for all.
    """

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origins)

    def check(self, headers: Mapping[str, str]) -> None:
        """Raises RequestError: a page of another site has sent the request."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if (origin is None and site is None) or site in _OWN:
            return
        if site is None and origin is not None and origin.partition("://")[2] == headers.get("host"):
            return  # a browser too old for Sec-Fetch-Site
        if "*" in self._origins or origin in self._origins:
            return
        sender = repr(origin[:200]) if origin else "another site"
        message = f"a web page of {sender} has sent this; --allowed-origins can allow it"
        raise RequestError(ErrorCode.PERMISSION_DENIED, message)

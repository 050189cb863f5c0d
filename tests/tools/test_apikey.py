"""``baton apikey``: what it prints works as the gateway's file of keys."""

import contextlib
import sys

import pytest

from common.config.tenancy import Quota
from gateway.http.access.api_keys import ApiKeyFile, digest_of
from scripts.cli import _run


def made(capsys, tmp_path, *words):
    assert _run(["apikey", *words]) == 0
    printed = capsys.readouterr()
    path = tmp_path / "keys.toml"
    path.write_text(printed.out)
    path.chmod(0o600)
    key = printed.err.split()[-1]
    assert key not in printed.out
    content = ApiKeyFile(path, (), {}).read()
    return content.keys[digest_of(key)], content.quotas


def test_a_key_has_a_tenant_with_limits(capsys, tmp_path):
    words = ("search", "--requests", "8", "--tokens-per-minute", "60000", "--days", "30")
    key, quotas = made(capsys, tmp_path, *words)
    assert (key.tenant, key.is_admin, quotas) == ("search", False, {"search": Quota(8, 60_000)})
    assert key.expires_at is not None


def test_an_admins_key_needs_no_tenant(capsys, tmp_path):
    key, quotas = made(capsys, tmp_path, "--admin")
    assert (key.tenant, key.is_admin, key.expires_at, quotas) == ("", True, None, {})


def test_an_end_that_no_date_has_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        _run(["apikey", "--days", "9999999"])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert (printed.out, "--days: must be at most 36500, not 9999999" in printed.err) == ("", True)


def test_each_key_is_another(capsys):
    keys = set()
    for _ in range(3):
        _run(["apikey"])
        keys.add(capsys.readouterr().err)
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [(["a b"], "a tenant's name has"), ([""], "a tenant's name has"), (["--requests", "1"], "give TENANT")],
)
def test_a_mistake_is_one_sentence(capsys, words, message):
    assert _run(["apikey", *words]) == 2
    printed = capsys.readouterr()
    assert (printed.out, message in printed.err) == ("", True)


def test_a_key_whose_entry_cannot_be_written_is_not_shown(capsys, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert _run(["apikey"]) == 1
        with contextlib.suppress(OSError):
            full.close()
    assert capsys.readouterr().err == "apikey: cannot write the entry to standard output: No space left on device\n"

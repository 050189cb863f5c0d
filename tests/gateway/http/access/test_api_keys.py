"""The file of hashed API keys: what it may say, and that it is read again when it changes."""

import asyncio
import errno
import logging
import os
from pathlib import Path

import pytest

from common.config.tenancy import Quota
from common.errors import ConfigError
from gateway.http.access import api_keys
from gateway.http.access.api_keys import ApiKeyFile, digest_of
from gateway.http.access.auth import ApiKey

K1, K2 = (f"sha256:{digest_of(key).hex()}" for key in ("k1", "k2"))


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "keys.toml"
    file.touch(0o600)
    return file


def read(path, text, permanent=(), quotas=None):
    path.write_text(text)
    return ApiKeyFile(path, permanent, quotas or {}).read()


def test_a_file_has_keys_and_the_limits_of_their_tenants(path):
    content = read(
        path,
        f"""
        [[key]]
        hash = "{K1}"
        tenant = "search"
        requests = 8
        tokens_per_minute = 60000
        [[key]]
        hash = "sha256:{digest_of("k2").hex().upper()}"
        tenant = "search"
        expires = 1970-01-01T00:01:00+00:00
        [[key]]
        hash = "sha256:{digest_of("k3").hex()}"
        admin = true
        """,
        quotas={"*": Quota(requests=1)},
    )
    assert content.keys == {
        digest_of("k1"): ApiKey("search"),
        digest_of("k2"): ApiKey("search", expires_at=60.0),
        digest_of("k3"): ApiKey(is_admin=True),
    }
    assert content.quotas == {"search": Quota(8, 60_000), "*": Quota(requests=1)}


def test_a_file_without_keys_lets_nobody_in(path):
    assert read(path, "# none\n").keys == {}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[[key]", "is not valid TOML"),
        ("key = " + "[" * 100_000, "is not valid TOML: it is nested too deeply"),
        ("key = 'secret'", r"must consist of \[\[key\]\] tables; key is not one"),
        ("[key]\nhash = 'secret'", r"must consist of \[\[key\]\] tables; key is not one"),
        ("keys = []", "keys is not one"),
        ("key = ['secret']", r"\[\[key\]\] 1: Expected object, got str"),
        ("[[key]]\ntenant = 'a'", r"\[\[key\]\] 1: Object missing required field hash"),
        (f"[[key]]\nhash = '{K1}'\n[[key]]\nhash = 'secret'", r"\[\[key\]\] 2: hash must be sha256: and 64"),
        (f"[[key]]\nhash = '{K1}'\ntenant = 'a b'", r"\[\[key\]\] 1: tenant must have 1 to 128 of"),
        (f"[[key]]\nhash = '{K1}'\ntenant = \"a\\n\"", r"\[\[key\]\] 1: tenant must have 1 to 128 of"),
        (f"[[key]]\nhash = '{K1}'\nrole = 'admin'", "unknown field role"),
        (f"[[key]]\nhash = '{K1}'\ntenant = 'a'\nrequests = 0", "requests"),
        (f"[[key]]\nhash = '{K1}'\nexpires = 2027-01-01T00:00:00", "timezone"),
        (f"[[key]]\nhash = '{K1}'\nexpires = 2027-01-01", "expires"),
        (f"[[key]]\nhash = '{K1}'\n[[key]]\nhash = '{K1}'", r"\[\[key\]\] 2 has the same hash as another"),
        (f"[[key]]\nhash = '{K1}'\nrequests = 1", "limits without a tenant; add tenant = NAME"),
        (
            f"[[key]]\nhash = '{K1}'\ntenant = 'a'\nrequests = 1\n[[key]]\nhash = '{K2}'\ntenant = 'a'\nrequests = 2",
            r"\[\[key\]\] 2 contradicts other limits of the tenant a",
        ),
        (f"[[key]]\nhash = '{K1}'\ntenant = 'b'\nrequests = 9", "contradicts other limits of the tenant b"),
        (f"[[key]]\nhash = 'sha256:{digest_of('main').hex()}'", "has the same key as --api-key"),
    ],
)
def test_an_error_names_the_table_and_no_key(path, text, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        read(path, text, [digest_of("main")], {"b": Quota(requests=1)})
    assert "secret" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(path, tmp_path):
    with pytest.raises(ConfigError, match=r"--api-key-file .*none cannot be read: No such file"):
        ApiKeyFile(tmp_path / "none", (), {}).read()
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read: it is not UTF-8"):
        ApiKeyFile(path, (), {}).read()
    path.write_bytes(b"#" * (api_keys.MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="is larger than"):
        ApiKeyFile(path, (), {}).read()


@pytest.mark.parametrize(
    ("mode", "is_open"), [(0o600, False), (0o400, False), (0o640, False), (0o644, True), (0o620, True)]
)
def test_a_file_that_others_may_use_is_warned_of(path, caplog, mode, is_open):
    path.chmod(mode)
    read(path, "")
    assert ("can be read or changed by other users" in caplog.text) == is_open


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


async def test_a_changed_file_that_cannot_be_read_at_once_is_read_until_it_can(path, caplog, monkeypatch):
    """Otherwise a key that was taken out of the file would stay valid."""
    monkeypatch.setattr(api_keys, "POLL_S", 0.002)
    file, read_text = ApiKeyFile(path, (), {}), Path.read_text
    errors = [OSError(errno.EMFILE, "Too many open files")] * 3 + [RuntimeError("can't start new thread")]

    def fail_at_first(path, **options):
        if errors:
            raise errors.pop()
        return read_text(path, **options)

    path.write_text(f"[[key]]\nhash = '{K1}'")
    file.read()
    seen = []
    following = asyncio.create_task(file.follow(lambda content: seen.append(set(content.keys))))
    monkeypatch.setattr(Path, "read_text", fail_at_first)
    path.write_text("")
    await until(lambda: seen)
    assert seen == [set()] and not errors
    for problem in ("Too many open files", "can't start new thread"):
        assert caplog.text.count(f"{problem}; the keys read before stay valid") == 1
    following.cancel()


async def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(path, caplog, monkeypatch):
    monkeypatch.setattr(api_keys, "POLL_S", 0.002)
    caplog.set_level(logging.INFO)
    file = ApiKeyFile(path, (), {})
    file.read()
    seen = []
    following = asyncio.create_task(file.follow(lambda content: seen.append(set(content.keys))))

    def put(text):
        new = path.with_suffix(".new")
        new.touch(0o600)
        new.write_text(text)
        os.replace(new, path)

    put(f"[[key]]\nhash = '{K1}'")
    await until(lambda: seen == [{digest_of("k1")}])
    put("[[key]]\nhash = ")
    await until(lambda: "is not valid TOML" in caplog.text)
    path.unlink()
    await until(lambda: "cannot be read: No such file" in caplog.text)
    assert len(seen) == 1
    put(f"[[key]]\nhash = '{K1}'\nrequests = {'9' * 5_000}")
    await until(lambda: "integer string conversion" in caplog.text)
    assert caplog.text.count("the keys read before stay valid") == 3
    put("")
    await until(lambda: len(seen) == 2)
    assert seen[1] == set()
    following.cancel()

"""Keys, fingerprints and records: what is not exactly ours is a miss."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import OURS, block, keys

from kvsteward.kv.blocks import Fingerprint, Miss, Reason, key
from kvsteward.kv.blocks.record import HEADER_BYTES, Record, crc, decode, encode_header, plain_crc

NOW_S = 1_000_000.0
KEY = keys(1)[0]


def record(payload: bytes = block(1), name: bytes = KEY, **options: float) -> bytes:
    return encode_header(name, payload, codec=0, raw_bytes=len(payload), **options) + payload


def reason(data: bytes, name: bytes = KEY) -> Reason | None:
    found = decode(memoryview(data), name, now_s=NOW_S)
    return found.reason if isinstance(found, Miss) else None


def test_every_field_of_a_fingerprint_makes_another_key():
    others = {}
    for field in dataclasses.fields(Fingerprint):
        value = getattr(OURS, field.name)
        changed = value + 1 if isinstance(value, int) else value + "x"
        others[field.name] = dataclasses.replace(OURS, **{field.name: changed}).digest()
    assert len({OURS.digest(), *others.values()}) == len(others) + 1


def test_text_cannot_flow_from_one_field_into_the_next():
    one = dataclasses.replace(OURS, model="ab", revision="c")
    other = dataclasses.replace(OURS, model="a", revision="bc")
    assert one.digest() != other.digest()


def test_another_process_makes_the_same_key():
    program = f"from kvsteward.kv.blocks import Fingerprint, key; print(key({OURS!r}, b'h' * 32, 3).hex())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == key(OURS, b"h" * 32, 3).hex()


def test_a_key_has_digest_group_and_hash():
    assert key(OURS, b"h" * 32, 3) == OURS.digest() + b"\0\0\0\3" + b"h" * 32
    for wrong in (b"", b"h" * 45):
        with pytest.raises(ValueError, match="make no key"):
            key(OURS, wrong)


@given(payload=st.binary(max_size=5000), expires=st.sampled_from([0.0, NOW_S + 1]))
def test_a_record_comes_back_as_it_was(payload, expires):
    found = decode(memoryview(record(payload, expires_s=expires)), KEY, now_s=NOW_S)
    assert isinstance(found, Record)
    assert (found.codec, found.raw_bytes, bytes(found.payload)) == (0, len(payload), payload)


def test_each_fault_has_its_name():
    whole = record()
    other_model = dataclasses.replace(OURS, model="other")
    other_tenant = dataclasses.replace(OURS, tenant_salt="b")
    assert reason(whole) is None
    assert reason(b"") is Reason.TRUNCATED
    assert reason(whole[:HEADER_BYTES]) is Reason.TRUNCATED
    assert reason(whole[:-1]) is Reason.TRUNCATED
    assert reason(whole + b"x") is Reason.TRUNCATED
    assert reason(whole[:-1] + bytes([whole[-1] ^ 1])) is Reason.CHECKSUM
    assert reason(b"X" + whole[1:]) is Reason.VERSION
    assert reason(whole[:4] + b"\2" + whole[5:]) is Reason.VERSION
    assert reason(whole[:5] + b"\7" + whole[6:]) is Reason.CHECKSUM
    assert reason(record(name=keys(1, other_model)[0])) is Reason.FOREIGN
    assert reason(record(name=keys(1, other_tenant)[0])) is Reason.FOREIGN
    assert reason(record(name=keys(2)[1])) is Reason.WRONG_KEY
    assert reason(record(expires_s=NOW_S)) is Reason.EXPIRED


@given(place=st.integers(0, 8 * len(record()) - 1))
def test_no_flipped_bit_passes(place):
    data = bytearray(record())
    data[place // 8] ^= 1 << place % 8
    assert reason(bytes(data)) in {Reason.CHECKSUM, Reason.VERSION}


def test_every_crc_gives_the_same_numbers():
    """Over and under the size from which the plain one works in parts, and in continuation."""
    for size in (0, 1, 5000, (256 << 10) + 1, 1 << 20):
        data = random.Random(size).randbytes(size)
        assert plain_crc(data) == crc()(data, 0) == zlib.crc32(data)
    assert plain_crc(data[7:], crc()(data[:7], 0)) == zlib.crc32(data)

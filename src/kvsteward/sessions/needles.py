"""The byte strings under which a piece of text can lie in raw JSON.

A message is kept as it came, so `say "hi"` may lie there as it is, escaped once (in a text) or twice (in the
arguments of a call, which are JSON within JSON), with non-ASCII letters as UTF-8 or as \\u escapes.

Knows no storage. Invariant: the needle as it is comes first, and no two are the same.
"""

from __future__ import annotations

import json

from kvsteward.errors import NotFoundError

MIN_PREFIX_DIGITS = 8


def needles(text: str) -> tuple[bytes, ...]:
    """`text` as UTF-8, then its JSON escapes: once and twice, with and without \\u. At most 7."""
    forms = [text]
    for _ in range(2):
        forms += [json.dumps(form, ensure_ascii=ascii_)[1:-1] for form in tuple(forms) for ascii_ in (False, True)]
        forms = list(dict.fromkeys(forms))
    return tuple(form.encode(errors="surrogatepass") for form in forms)


def hash_prefix(prefix: str) -> str:
    """`prefix` in lower case. Raises NotFoundError where it is not 8 hex digits or more."""
    prefix = prefix.lower()
    if len(prefix) < MIN_PREFIX_DIGITS or not set(prefix) <= set("0123456789abcdef"):
        raise NotFoundError(f"an item is named by {MIN_PREFIX_DIGITS} hex digits or more, not by {prefix[:64]!r}")
    return prefix

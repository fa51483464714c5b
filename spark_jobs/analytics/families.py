"""What error texts that are parameterised alike have in common: for all of a batch at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.dlq.capture import fingerprint as rules

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ANY_DIGIT = bytes.maketrans(b"0123456789", b"1111111111")
_HEX = "[0-9a-fA-F]"
_UUID = r"([ \t\"'/(=\[])" + f"{_HEX}{{8}}-" + f"{_HEX}{{4}}-" * 3 + f"{_HEX}{{12}}"
_ANY_UUID = r"\111111111-1111-1111-1111-111111111111"
_LONGEST_WITH_UUID = 300
_END = "([ ;)]|[,:] |$)"
_IP = " " + r"[0-9]{1,3}\." * 3 + "[0-9]{1,3}"
_TOKENS = (
    (r" [A-Za-z0-9._-]{1,64}(@[A-Za-z0-9-]{1,63}\.[A-Za-z0-9-])", r" a\1"),
    (f" {_HEX}{{16,64}}([ ,;]|$)", r" 11111111\1"),
    (_IP + ":[0-9]{1,5}" + _END, r" 1.1.1.1:1\1"),
    (_IP + _END, r" 1.1.1.1\1"),
    ("(^| )[0-9]{1,40}" + _END, r"\11\2"),
)


def likeness(text: str) -> bytes:
    """Return what *text* has in common with others that are parameterised exactly as it is.

    The rules look at digits by class alone, except in `0x`.
    """
    found = text[: rules.MOST_TEXT].encode("utf-8", "surrogatepass")
    return found if b"0x" in found else found.translate(_ANY_DIGIT)


def families(texts: pa.Array) -> pa.DictionaryArray:
    """Return what each of *texts* has in common with others that differ in digits or tokens.

    Behind a sign where no mask but a URL can be under way, a UUID is one whatever its digits are;
    its length is kept, for a URL ends by it. Between spaces nothing is under way: there the
    digits of a number or an IP address have no say, nor how many there are, nor have those of a
    long hexadecimal number and the name in an email address.

    It is a dictionary without repetitions. Each step looks at what the one before left different:
    most texts differ in digits alone.
    """
    texts = pc.utf8_slice_codeunits(texts, 0, rules.MOST_TEXT)
    alike = _with_any_digit(texts).dictionary_encode()
    may_be_exact = pc.any(pc.match_substring(alike.dictionary, "1x")).as_py()
    for pattern, same in ((_UUID, _ANY_UUID), *_TOKENS):
        words = alike.dictionary
        replaced = pc.replace_substring_regex(words, pattern=pattern, replacement=same)
        if pattern is _UUID:
            is_short = pc.less(pc.binary_length(words), _LONGEST_WITH_UUID)
            replaced = pc.if_else(is_short, replaced, words)
        fewer = replaced.dictionary_encode()
        alike = pa.DictionaryArray.from_arrays(
            fewer.indices.take(alike.indices), fewer.dictionary, safe=False
        )
    if not may_be_exact:
        return alike
    is_exact = pc.match_substring(texts, "0x")
    return pc.if_else(is_exact, texts, alike.dictionary_decode()).dictionary_encode()


def has_odd_signs(texts: pa.Array) -> NDArray[np.bool_]:
    """Whether what *texts*, as JSON writes them, have in common may part once they are read.

    Digits count in the escape of a sign but the quotation mark, and escapes make a text longer.
    """
    odd: NDArray[np.bool_] = np.zeros(len(texts), bool)
    rows = np.flatnonzero(pc.match_substring(texts, "\\").to_numpy(zero_copy_only=False))
    if len(rows):
        escaped = texts.take(rows)
        is_other = pc.match_substring_regex(escaped, r"\\u(?:[^0]|0[^0]|00[^2]|002[^2])")
        is_long = pc.greater(pc.binary_length(escaped), rules.MOST_TEXT)
        odd[rows] = pc.or_(is_other, is_long).to_numpy(zero_copy_only=False)
    return odd


def _with_any_digit(texts: pa.Array) -> pa.Array:
    """Return *texts* with one digit for all, by one pass over the bytes of all."""
    validity, ends, values = pa.concat_arrays([texts]).buffers()
    same = b"" if values is None else values.to_pybytes().translate(_ANY_DIGIT)
    return pa.StringArray.from_buffers(len(texts), ends, pa.py_buffer(same), validity)

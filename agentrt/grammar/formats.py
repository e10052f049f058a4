"""What each `format` means: one pattern each, used both to constrain and to check, and where no pattern can say it all, a predicate.

One set for all drafts. A format with a predicate is narrower than its pattern, so it can only be CHECKED; the others
are exact and ENFORCED. A name that is not here asserts nothing: unknown formats are annotations.
Sources: RFC 3339, 3986, 3987, 5321, 5890, 6531, 6570, 6901, 4122, ECMA-262.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import idna
import regex

from agentrt.errors import GrammarError
from agentrt.grammar import regex_syntax


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        patterns: ECMA patterns that the whole string must match, each of them; exact unless there is a predicate.
        max_length: Most characters, or None.
        holds: What the pattern cannot say, asked of strings that match it.
    """

    patterns: tuple[str, ...]
    max_length: int | None = None
    holds: Callable[[str], bool] | None = None

    @property
    def exact(self) -> bool:
        """Whether the pattern and the length say it all."""
        return self.holds is None

    def accepts(self, text: str) -> bool:
        """Whether `text` is of this format."""
        if self.max_length is not None and len(text) > self.max_length:
            return False
        matches = all(_compiled(pattern).fullmatch(text) for pattern in self.patterns)
        return matches and (self.holds is None or self.holds(text))

    def constraint(self) -> list[dict[str, Any]]:
        """What a constrained string must satisfy, as schemas for llguidance."""
        parts: list[dict[str, Any]] = [{"pattern": f"^(?:{core_of(p)})$"} for p in self.patterns if p != _ANY]
        return parts if self.max_length is None else [*parts, {"maxLength": self.max_length}]


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> regex.Pattern[str]:
    return regex.compile(core_of(pattern))


@lru_cache(maxsize=64)
def core_of(pattern: str) -> str:
    """The pattern as engines take it."""
    return regex_syntax.write(regex_syntax.parse(pattern, "ecma"))


# ---- dates and times

_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_OFFSET = r"(?:[zZ]|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_FRACTION = r"(?:\.[0-9]+)?"
_PLAIN_TIME = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{_FRACTION}{_OFFSET}"


def _hours_of_leap_seconds() -> str:
    """Times whose hour fits: second 60 exists only where it is 23:59 in UTC, whatever the offset makes of that."""
    ways = [_PLAIN_TIME, rf"23:[0-5][0-9]:60{_FRACTION}[zZ]"]
    for hour in range(24):
        ways.append(rf"{hour:02}:[0-5][0-9]:60{_FRACTION}(?:-{23 - hour:02}:[0-5][0-9]|\+{hour:02}:(?:0[1-9]|[1-5][0-9]))")
        ways.append(rf"{hour:02}:59:60{_FRACTION}\+{(hour + 1) % 24:02}:00")
    return f"(?:{'|'.join(ways)})"


def _minutes_of_leap_seconds() -> str:
    """Times whose minute fits; with the hours, exactly the leap seconds that exist (one pattern for both is 20 times as large)."""
    ways = [_PLAIN_TIME, rf"[0-9]{{2}}:59:60{_FRACTION}[zZ]"]
    for minute in range(60):
        ways.append(rf"[0-9]{{2}}:{minute:02}:60{_FRACTION}(?:-[0-9]{{2}}:{59 - minute:02}|\+[0-9]{{2}}:{(minute + 1) % 60:02})")
    return f"(?:{'|'.join(ways)})"


_SECOND = r"[0-9]+S"
_MINUTE = rf"[0-9]+M(?:{_SECOND})?"
_HOUR = rf"[0-9]+H(?:{_MINUTE})?"
_DURATION_TIME = rf"T(?:{_HOUR}|{_MINUTE}|{_SECOND})"
_DAY = r"[0-9]+D"
_MONTH = rf"[0-9]+M(?:{_DAY})?"
_YEAR = rf"[0-9]+Y(?:{_MONTH})?"
_DURATION = rf"P(?:(?:{_DAY}|{_MONTH}|{_YEAR})(?:{_DURATION_TIME})?|{_DURATION_TIME}|[0-9]+W)"

# ---- addresses

_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_H16 = r"[0-9a-fA-F]{1,4}"
_LS32 = rf"(?:{_H16}:{_H16}|{_IPV4})"
_IPV6 = "(?:" + "|".join(
    (
        rf"(?:{_H16}:){{6}}{_LS32}",
        rf"::(?:{_H16}:){{5}}{_LS32}",
        rf"(?:{_H16})?::(?:{_H16}:){{4}}{_LS32}",
        rf"(?:(?:{_H16}:){{0,1}}{_H16})?::(?:{_H16}:){{3}}{_LS32}",
        rf"(?:(?:{_H16}:){{0,2}}{_H16})?::(?:{_H16}:){{2}}{_LS32}",
        rf"(?:(?:{_H16}:){{0,3}}{_H16})?::{_H16}:{_LS32}",
        rf"(?:(?:{_H16}:){{0,4}}{_H16})?::{_LS32}",
        rf"(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}",
        rf"(?:(?:{_H16}:){{0,6}}{_H16})?::",
    )
) + ")"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9\-]{0,61}[a-zA-Z0-9])?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
_ATEXT = r"a-zA-Z0-9!#$%&'*+\-/=?\^_`{\|}~"
_QUOTED = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'
_SUBDOMAIN = r"[a-zA-Z0-9](?:[a-zA-Z0-9\-]*[a-zA-Z0-9])?"
_LITERAL = rf"\[(?:{_IPV4}|IPv6:{_IPV6})\]"
_EMAIL = rf"(?:[{_ATEXT}]+(?:\.[{_ATEXT}]+)*|{_QUOTED})@(?:{_SUBDOMAIN}(?:\.{_SUBDOMAIN})*|{_LITERAL})"
_WIDE = r"\u0080-\ud7ff\ue000-\uffff\u{10000}-\u{10fffe}"
_IDN_QUOTED = rf'"(?:[ !#-\[\]-~{_WIDE}]|\\[ -~])*"'
_IDN_SUBDOMAIN = rf"[a-zA-Z0-9{_WIDE}](?:[a-zA-Z0-9\-{_WIDE}]*[a-zA-Z0-9{_WIDE}])?"
_IDN_EMAIL = rf"(?:[{_ATEXT}{_WIDE}]+(?:\.[{_ATEXT}{_WIDE}]+)*|{_IDN_QUOTED})@(?:{_IDN_SUBDOMAIN}(?:\.{_IDN_SUBDOMAIN})*|{_LITERAL})"


def _hostname_holds(text: str) -> bool:
    return all(_label_holds(label) for label in text.split("."))


def _label_holds(label: str) -> bool:
    """Labels with "--" in third place are reserved, but for "xn--" before valid punycode (RFC 5890)."""
    if label[2:4] != "--":
        return True
    if label[:4].lower() != "xn--":
        return False
    try:
        idna.ulabel(label)
    except (idna.IDNAError, UnicodeError):
        return False
    return True


def _idn_hostname_holds(text: str) -> bool:
    labels = regex.split("[.\u3002\uff0e\uff61]", text)
    if not all(labels):
        return False
    try:
        encoded = [idna.alabel(label).decode() for label in labels]
    except (idna.IDNAError, UnicodeError):
        return False
    if any(regex.search(r"[\p{bc=R}\p{bc=AL}\p{bc=AN}]", label) for label in labels) and not all(map(_follows_bidi_rule, labels)):
        return False
    return len(".".join(encoded)) <= 253 and all(map(_label_holds, encoded))


def _follows_bidi_rule(label: str) -> bool:
    """RFC 5893: where one label runs from right to left, every label must keep its rule."""
    try:
        return idna.check_bidi(label, check_ltr=True)
    except idna.IDNAError:
        return False


# ---- references

_PCT = r"%[0-9a-fA-F]{2}"
_UCS = r"\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef" + "".join(
    rf"\u{{{plane:x}0000}}-\u{{{plane:x}fffd}}" for plane in range(1, 14)
).replace(r"\u{e0000}", r"\u{e1000}")
_PRIVATE = r"\ue000-\uf8ff\u{f0000}-\u{ffffd}\u{100000}-\u{10fffd}"


def _reference(extra: str, private: str, *, scheme: bool) -> str:
    """RFC 3986's URI (`scheme`) or URI-reference, with RFC 3987's characters where given."""
    unreserved = rf"a-zA-Z0-9\-._~{extra}"
    sub = r"!$&'()*+,;="
    pchar = rf"(?:[{unreserved}{sub}:@]|{_PCT})"
    userinfo = rf"(?:[{unreserved}{sub}:]|{_PCT})*@"
    future = rf"[vV][0-9a-fA-F]+\.[a-zA-Z0-9\-._~{sub}:]+"
    host = rf"(?:\[(?:{_IPV6}|{future})\]|(?:[{unreserved}{sub}]|{_PCT})*)"
    authority = rf"(?:{userinfo})?{host}(?::[0-9]*)?"
    slashed = rf"(?:/{pchar}*)*"
    rootless = rf"{pchar}+{slashed}"
    noscheme = rf"(?:[{unreserved}{sub}@]|{_PCT})+{slashed}"
    query = rf"(?:\?(?:[{unreserved}{sub}:@/?{private}]|{_PCT})*)?"
    fragment = rf"(?:#(?:[{unreserved}{sub}:@/?]|{_PCT})*)?"
    full = rf"[a-zA-Z][a-zA-Z0-9+\-.]*:(?://{authority}{slashed}|/(?:{rootless})?|{rootless}|){query}{fragment}"
    if scheme:
        return full
    return rf"(?:{full}|(?://{authority}{slashed}|/(?:{rootless})?|{noscheme}|){query}{fragment})"


_VARCHAR = rf"(?:[a-zA-Z0-9_]|{_PCT})"
_VARSPEC = rf"{_VARCHAR}(?:\.?{_VARCHAR})*(?::[1-9][0-9]{{0,3}}|\*)?"
_URI_TEMPLATE = rf"(?:[!#$&-;=?-\[\]_a-z~{_UCS}{_PRIVATE}]|{_PCT}|\{{[+#./;?&=,!@|]?{_VARSPEC}(?:,{_VARSPEC})*\}})*"
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"


def _is_ecma_pattern(text: str) -> bool:
    try:
        regex_syntax.parse_any(text)
    except GrammarError:
        return False
    return True


_ANY = r"[^]*"

FORMATS: dict[str, Format] = {
    "date": Format((_DATE,)),
    "time": Format((_hours_of_leap_seconds(), _minutes_of_leap_seconds())),
    "date-time": Format((f"{_DATE}[tT]{_hours_of_leap_seconds()}", f"[^]{{10}}[tT]{_minutes_of_leap_seconds()}")),
    "duration": Format((_DURATION,)),
    "ipv4": Format((_IPV4,)),
    "ipv6": Format((_IPV6,)),
    "hostname": Format((_HOSTNAME,), 253, _hostname_holds),
    "idn-hostname": Format((_ANY,), None, _idn_hostname_holds),
    "email": Format((_EMAIL,)),
    "idn-email": Format((_IDN_EMAIL,)),
    "uri": Format((_reference("", "", scheme=True),)),
    "uri-reference": Format((_reference("", "", scheme=False),)),
    "iri": Format((_reference(_UCS, _PRIVATE, scheme=True),)),
    "iri-reference": Format((_reference(_UCS, _PRIVATE, scheme=False),)),
    "uri-template": Format((_URI_TEMPLATE,)),
    "uuid": Format((r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",)),
    "json-pointer": Format((_POINTER,)),
    "relative-json-pointer": Format((rf"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",)),
    "regex": Format((_ANY,), None, _is_ecma_pattern),
}

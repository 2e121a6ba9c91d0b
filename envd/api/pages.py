"""Split a sorted listing into pages without skipping or repeating an item. Pure.

A page token encodes the key after which the next page begins, so items may be added and removed between two pages.
"""

import base64
import binascii
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import TypeVar

from envd.api.convert_requests import int_in_range
from envd.base.errors import InvalidRequest

Item = TypeVar("Item")

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
_TOKEN_MARK = "1:"  # noqa: S105 -- the token's version, not a secret


def page_of(
    items: Iterable[Item],
    *,
    key: Callable[[Item], str],
    page_size: int,
    page_token: str,
    has_more: bool = False,
    is_sorted: bool = False,
) -> tuple[tuple[Item, ...], str]:
    """Return the page of `items`, sorted by their unique keys, that the token identifies, and the next page's token.

    That is empty on the last page.

    Args:
        page_size: Most items of a page; 0 for the default.
        page_token: From the previous page; empty for the first one.
        has_more: Whether there are further items, after all of `items`.
        is_sorted: Whether `items` are in the order of their keys. Then only a few keys are made.

    Raises:
        InvalidRequest: The size is out of range, or the token is not from this listing.
    """
    size = int_in_range(page_size, "page_size", default=DEFAULT_PAGE_SIZE, low=1, high=MAX_PAGE_SIZE)
    after = _decoded(page_token) if page_token else ""
    ordered = list(items) if is_sorted else sorted(items, key=key)
    left = ordered[bisect_right(ordered, after, key=key) :]
    token = _encoded(key(left[:size][-1])) if left and (has_more or len(left) > size) else ""
    return tuple(left[:size]), token


def _encoded(key: str) -> str:
    return base64.urlsafe_b64encode(f"{_TOKEN_MARK}{key}".encode()).decode()


def _decoded(token: str) -> str:
    try:
        text = base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError):
        text = ""
    if not text.startswith(_TOKEN_MARK):
        raise InvalidRequest("page_token", "is not from this listing; omit it to start at the first page")
    return text.removeprefix(_TOKEN_MARK)

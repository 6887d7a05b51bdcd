"""Reading a page that a report wrote."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """Collects what a page shows and refers to, and checks that its elements close in order."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def assert_self_contained(html: str) -> Page:
    """Assert that `html` is well formed, has no script and loads nothing; its links lead to parts of it."""
    page = Page(html)
    assert not page.open
    assert not {"script", "link", "img", "iframe"} & set(page.seen)
    assert all(link.startswith("#") for link in page.links)
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert "@import" not in html
    assert "url(http" not in html
    assert "prefers-color-scheme: dark" in html
    return page

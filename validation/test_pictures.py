"""Every picture of the report can be drawn from what its claim gives."""

from __future__ import annotations

import pytest

from kvsketch.validation.claim import Setting
from kvsketch.validation.pictures import PICTURES, Picture, draw_pictures
from kvsketch.validation.registry import load_claim
from kvsketch.validation.runner import run_claim
from kvsketch.validation.test_claims import need


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.claim)
def test_picture_is_drawn_from_its_claim(picture: Picture) -> None:
    """With few samples: what is measured has no part here."""
    claim = load_claim(picture.claim)
    need(claim)
    drawn, left_out = draw_pictures([run_claim(claim, Setting(share=0.05))])
    assert [one["heading"] for one in drawn] == [picture.heading]
    assert len(left_out) == len(PICTURES) - 1
    assert drawn[0]["svg"].startswith("<svg")

"""Tests of the library; run them with `pytest --pyargs kvsketch`."""

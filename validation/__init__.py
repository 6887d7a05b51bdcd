"""The papers' claims, checked by statistics with stated error probabilities: one claim a file.

``kvsketch validate`` runs them all and writes a report; ``pytest --pyargs kvsketch.validation`` runs them as tests.
"""

from __future__ import annotations

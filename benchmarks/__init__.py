"""Benchmarks of kvsketch: each figure is measured against its rivals in one process, in turns.

- ``python -m benchmarks decode`` (also ``encode``, ``scaling``, ``threads``, ``start``, ``generate``) prints tables,
  ``python -m benchmarks shows`` figures beside the bars that they are held to. ``make bench`` runs a short set.
- ``make bench-rivals`` compares generation with transformers' quantized caches and llama.cpp, in its own environment.
- ``asv run`` (``pip install 'kvsketch[bench]'``, settings in asv.conf.json) follows the same figures over commits.

One thread means one thread of torch and one of the library; no process is bound to a core: the scheduler finds the idle
one. A figure that was taken beside a busy process, or while a plain read was not steady, is marked as contended.
"""

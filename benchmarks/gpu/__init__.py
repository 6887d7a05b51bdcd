"""What a machine with a CUDA GPU has to show, in one command: ``make gpu``, or ``python -m benchmarks gpu``.

Each part (:mod:`benchmarks.gpu.parts`) runs in a process of its own with a time limit of its own, and writes what it
finds as it goes. ``--dry-run`` runs all of them without a GPU, on tiny shapes and a stand-in for CuPy.
"""

"""Grading: submissions are read as data, their answers run in children, and judged here, outside.

Threat model. A submission is a file by a stranger. It is never opened by Jupyter, and no cell of it runs in the grader.
What the grader defends against:

- an answer that hangs, dies, calls exit, eats memory, floods the screen, starts processes or leaves threads: it costs
  its author that exercise and nobody else anything;
- edited, deleted, doubled or reordered cells: checks of a submission are never run, answers are found by id and name;
- objects that claim to equal everything, patched checks, swallowed errors: an answer's child only writes down what it
  saw, as plain data, and the grader compares that with the right answer, which the child does not have;
- a forged result: it is judged as any other data, so it has to hold the right values for every random case;
- text meant for the teacher's browser or spreadsheet: pages escape it, cells of the CSV can't become formulas.

What holds an answer: a process of its own with limits on time, memory, processes and file sizes, an empty working
folder, a copy of the package without the right answers. Where Linux allows it also name spaces of its own for
processes, network and mounts (the book's folders, its history and the folders of submissions and marks look empty, and
its working folder goes with it), and for a grader that runs as root another user, who can write none of your files (but
read them all, if Python itself lies in root's own folders). A report says in one line which of these were on.

What it does not stop: an answer can leave files in /tmp, and read another copy of the book that lies elsewhere. Without
the other user, an answer can reach whatever files the teacher can; without name spaces it has the network, and a child
that leaves its group may live on for a while. Grade strangers in a container, or as root on Linux. Kernel bugs are out
of scope, and so is copying from a neighbour.
"""

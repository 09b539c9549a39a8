"""Starts a step's process. child.py can't do so itself: run as a program it would be imported a second time."""

from support.gpu.child import main

main()

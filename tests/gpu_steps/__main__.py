"""Starts the process of a step. child.py can't do that itself: run as a program it would be imported a second time."""

from gpu_steps.child import main

main()

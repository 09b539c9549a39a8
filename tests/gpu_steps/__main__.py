"""The process of a step. Apart from child.py, which the modules of checks import and which must be there only once."""

from gpu_steps.child import main

main()

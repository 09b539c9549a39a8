"""An editable install out of the way: its finder comes before the folders of PYTHONPATH, in every new process."""

WITHOUT_EDITABLE = "import sys\nsys.meta_path = [f for f in sys.meta_path if 'editable' not in type(f).__module__]\n"
"""The text of a ``sitecustomize.py``, or the first lines of a script, that import pyattn from a folder of their own."""

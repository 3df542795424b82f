"""``python -m tidekv``"""

from tidekv.cli import command

command()

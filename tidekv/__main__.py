"""``python -m tidekv``"""

import sys

from tidekv.cli import main

sys.exit(main())

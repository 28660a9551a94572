"""``python -m shared_ffi``: the self-test."""

import sys

from shared_ffi.selftest.report import main

if __name__ == "__main__":
    sys.exit(main())

"""The self-test, ``python -m shared_ffi``. No other part of shared_ffi imports it."""

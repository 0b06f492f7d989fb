"""torch's FlatParamHandle on flatparam's C core, and the functions that install it under torch's wrapper."""

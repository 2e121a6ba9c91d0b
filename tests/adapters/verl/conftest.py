"""Import verl before the tests do: its imports warn of deprecations, which are errors in tests of ours."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import verl.trainer.ppo.v1  # noqa: F401

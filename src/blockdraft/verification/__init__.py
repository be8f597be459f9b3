"""Which guesses the target accepts, and the token that follows them."""

from blockdraft.verification.verify import Verdict, verify

__all__ = ["Verdict", "verify"]

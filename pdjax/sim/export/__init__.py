"""The table for other checkers: a Murphi model (run by Rumur) and an inductive invariant (z3)."""

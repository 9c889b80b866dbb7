"""Which tokens of a long sequence keep their KV: budgets, scores, protections, and the choice itself.

Nothing here runs a model or sees a tensor: an engine brings the attention mass that rows gave to what is kept
(:mod:`~ostinato.retention.evidence`), a method makes scores of it (:mod:`~ostinato.retention.methods`), and
:mod:`~ostinato.retention.choice` takes the best within the budget. :mod:`~ostinato.retention.keeping` holds
it together for one sequence.

Every layer, and where a method wants it every key head, keeps its own tokens, all the same number: then one
block table serves them all, and dropping tokens frees whole blocks.
"""

"""The prefix cache: which KV is where, who may use it, and what goes when room is needed.

Bottom to top: ``hashing`` names what may be exchanged, ``arena`` has the tensors, ``policy`` says what goes
first, ``pool`` counts blocks, ``index`` finds prefixes, ``manager`` is the one door to both of them. All but
the arena moves integers only.
"""

"""What the page on circuits can show, and what it says of each."""

OV, QK, EIGENVALUES, PLANE = "OV", "QK", "eigenvalues", "OV × QK"
TRIGRAMS, BIGRAMS, DIRECTIONS = "skip-trigrams", "bigrams", "singular directions"
LIMITS = (
    "Later layers read more than the embedding: there this is the part that comes straight from it. With LayerNorm it "
    "holds up to the positive scale that each token is divided by."
)
EXPLANATIONS = {
    OV: f"""\
**OV circuit**, W_E W_OV W_U: what attending to a source token (row) adds to the logit of an output token (column), less
the mean over all outputs, since adding one number to every logit changes nothing.

**Null.** An entry is the scalar product of what the head writes for a source and the direction of an output. Turned
against each other at random it stays within a band that is known exactly; entries inside it are left blank. One in
twenty leaves it by chance, so what counts is how many do. {LIMITS}
""",
    QK: f"""\
**QK circuit**, W_E W_QK W_Eᵀ / √d_head with the biases: how strongly a destination token (row) looks for a source token
(column), as a score before the softmax, less the mean over all sources, which the softmax does not see. Positions are
not in it.

**Null.** The query's weights turned at random in the space they read; the band of each entry is exact, entries inside
it are left blank. {LIMITS}
""",
    EIGENVALUES: """\
**Eigenvalues** of the circuit between tokens; all that can differ from 0 are those of a d_head × d_head matrix. An
eigenvector with a positive eigenvalue is a mix of tokens that raises itself (OV: copying) or looks for itself (QK:
matching). Areas are proportional to |λ|; both axes are divided by the largest |λ|.

**Null.** The haze: the same circuit with what the head writes (OV) or what its queries read (QK) turned at random. At
the right Σ Re λ / Σ |λ| of every head with the middle 95 % of its null; small heads reach far by chance.
""",
    PLANE: """\
**The plane.** A head that copies lies at the right. A pair lies at the top if the later head looks for sources about
which an earlier head wrote its own token: that is K-composition which matches. An induction head does both, so true
pairs sit in the top right corner. In a model of one layer the vertical axis is that of the head's own QK circuit.

**Null.** Grey bars: the middle 95 % of both nulls, mean over what is shown; a hollow dot lies inside one of its own. A
corner is no proof: the cut is on the page Heads.
""",
    TRIGRAMS: """\
**Skip-trigrams**, source … destination → out, read from the weights of a model of one layer of attention: p(out) in a
*canonical context*, the source in one place, the destination last, a neutral filler elsewhere; ranked by p less its
mean over other sources, the reference. *Default*: no head attends to the source; the model says so anyway.

**Bugs.** A head factors into where it looks (QK) and what it moves (OV). If it serves s … d → o and s … d′ → o′, it
raises s … d → o′ as well: a *head-level* bug. *Behavioural*: the whole model prefers the wrong out. The share of other
tokens that meet the same criterion is its null.

In a deeper model, a head of block 1 alone: attention × OV.
""",
    BIGRAMS: """\
**Bigrams**: what the model says after a token without any head, softmax(W_E W_U + b_U), the direct path. In a model
without layers that is all there is. The truth is the task's own transition matrix, or else how often each token
followed in the training sequences.

**KL** is what a reader of the truth loses by believing the model, in nats a token; its null is somebody who knows how
often each token comes, but not after which. Where heads do the work, the direct path need not be right.
""",
    DIRECTIONS: """\
**Singular directions** of W_OV or W_QK: the strongest first, with the tokens at both ends. What lies at the + end of
the input goes with the + end of the output, and − with −; which end is called + means nothing.

**Null.** The share of the squared singular values that the n-th direction has in random factors of the same shapes
(middle 95 %); a share inside it is grey. The tokens have no null of their own: some lie furthest in any direction.
""",
}  # fmt: skip

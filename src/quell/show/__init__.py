"""What people read: `words`, `outcomes` (sentences), `tables` (terminal), `plots` (pictures), `page` (one HTML file).

Nothing is computed here. Whoever calls has asked for the numbers before (`quell.planning.questions`,
`quell.planning.curves`), which is why this room lies below the plan and never imports it but for types.
"""

"""Measurements: recorded, stored, compared and graded. A leaf that plans and reports share."""

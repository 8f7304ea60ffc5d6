"""The hand-off to the harness: a Genie bundle, its typed configurations, its manifest."""

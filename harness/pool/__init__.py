"""Device pool: exclusive leases of devices across processes, and repair of devices that failed."""

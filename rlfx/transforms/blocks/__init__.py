"""Any loss of a batch in blocks of it: rules by primitive, passes, scans; with the batch on the host."""

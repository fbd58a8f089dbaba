"""What `tandem certify` measures and proves on a machine, part by part, and the report that it makes."""

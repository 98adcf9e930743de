//! pci

//! A physical PCI function, owned through the kernel's VFIO and served to one client, whole.
//!
//! The server sits beside the data path: the client maps the function's BARs, the IOMMU reaches the client's memory,
//! and interrupts go from the kernel to the client's eventfds.
//!
//! * [`host`]: the functions of this machine, and how they are handed over and taken back.
//! * [`list`]: what of them is shown.
//! * [`areas`]: what of a BAR may be mapped.

pub mod areas;
pub mod host;
pub mod list;

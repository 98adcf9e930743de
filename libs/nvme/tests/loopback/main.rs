//! The driver in one process with what it drives: the controller of this crate, and a device that lies.

mod disks;
mod iops;
mod lying_device;
mod machine;
mod plugged;
mod served;

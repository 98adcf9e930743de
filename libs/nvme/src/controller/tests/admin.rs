//! Admin commands.

use super::machine::*;
use crate::controller::Options;
use crate::spec::{AdminOpcode, Cns, IdentifyController, IdentifyNamespace, Status};

fn ready() -> Machine {
    let disks = vec![RamDisk::new(1024, 9, Pace::AtOnce), RamDisk::new(512, 12, Pace::AtOnce)];
    Machine::enabled(Options::default(), disks, 0, 2).0
}

#[test]
fn identify_tells_of_the_controller_and_its_namespaces() {
    let mut machine = ready();
    machine.admin(AdminOpcode::IDENTIFY, 0, Cns::CONTROLLER.0.into(), 0).unwrap();
    let controller: IdentifyController = machine.data();
    assert_eq!(&controller.serial, b"OUTBOARD0001        ");
    assert_eq!(controller.namespaces.get(), 2);
    assert!(!controller.admin_commands.doorbell_buffer());
    assert!(controller.subsystem_name.starts_with(b"nqn.2014-08.org.nvmexpress:uuid:"));

    for (nsid, blocks, shift) in [(1, 1024, 9), (2, 512, 12)] {
        machine.admin(AdminOpcode::IDENTIFY, nsid, Cns::NAMESPACE.0.into(), 0).unwrap();
        let namespace: IdentifyNamespace = machine.data();
        assert_eq!(namespace.size.get(), blocks);
        assert_eq!(namespace.lba_format().data_shift(), shift);
    }
    for nsid in [0, 3, u32::MAX] {
        let result = machine.admin(AdminOpcode::IDENTIFY, nsid, Cns::NAMESPACE.0.into(), 0);
        assert_eq!(result, Err(Status::INVALID_NAMESPACE));
    }
}

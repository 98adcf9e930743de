//! What only clients of ours propose, and what they get.

use super::*;

/// A device behind an IOMMU, whose table no guest may write: the pages beside it are still given, in BAR0.
fn without_remapping() -> Copier {
    let mut device = Copier::new();
    let [bar0, bar1, ..] = device.description.regions.as_mut_slice() else { unreachable!() };
    for (region, areas) in [(bar0, vec![SparseArea { offset: 0, size: PAGE as u64 }]), (bar1, vec![])] {
        region.mappable.as_mut().unwrap().direct = Direct::Withheld { areas };
    }
    device.description.pgsizes = 0x4020_1000;
    device.description.max_dma_maps = 2;
    device.description.iova_ranges = vec![(0, 0xfedf_ffff), (0xfef0_0000, 0x7f_ffff_ffff)];
    device
}

const ASKS: Options = Options { msix_direct: true, iova_ranges: true, ..DEFAULT };
const DEFAULT: Options =
    Options { timeout: Duration::from_secs(5), twin_socket: true, msix_direct: false, iova_ranges: false };

#[test]
fn who_proposes_nothing_is_told_nothing_and_maps_what_there_is() {
    with_device(&without_remapping(), DEFAULT, |client| {
        assert_eq!((client.msix_direct(), client.iova_ranges()), (None, None));
        for index in [0, 1] {
            let region = client.region(index).unwrap();
            assert!(region.is_msix_mappable());
            assert_eq!(region.areas().unwrap(), [SparseArea { offset: 4096, size: 4096 }]);
        }
    });
}

#[test]
fn the_table_is_kept_from_a_guest_that_would_write_it_where_that_does_not_work() {
    with_device(&without_remapping(), ASKS, |client| {
        assert_eq!(client.msix_direct(), Some(false));
        let bar0 = client.region(0).unwrap();
        assert!(!bar0.is_msix_mappable());
        let [area] = bar0.areas().unwrap()[..] else { panic!("{bar0:?}") };
        assert_eq!(area, SparseArea { offset: 0, size: 4096 });
        bar0.map(area, Access::ReadWrite).unwrap();
        let bar1 = client.region(1).unwrap();
        assert!(!bar1.is_msix_mappable());
        assert!(bar1.areas().unwrap().is_empty(), "{bar1:?}");
        assert!(bar1.file().is_none(), "{bar1:?}");
        // The others have no table.
        assert!(client.region(2).unwrap().is_msix_mappable());
    });
}

#[test]
fn the_table_is_given_where_it_works() {
    with_device(&Copier::new(), ASKS, |client| {
        assert_eq!(client.msix_direct(), Some(true));
        assert!(client.region(0).unwrap().is_msix_mappable());
        assert_eq!(client.iova_ranges(), Some(&[][..]));
    });
}

#[test]
fn the_limits_of_an_iommu_are_told_and_kept() {
    with_device(&without_remapping(), ASKS, |client| {
        assert_eq!(client.iova_ranges(), Some(&[(0, 0xfedf_ffff), (0xfef0_0000, 0x7f_ffff_ffff)][..]));
        let capabilities = client.capabilities();
        assert_eq!((capabilities.pgsizes, capabilities.max_dma_maps), (Some(0x4020_1000), Some(2)));
        let memory = SharedMemory::new("guest", 3 * PAGE).unwrap();
        let map = |index: usize| {
            let part = Memory { file: memory.as_fd(), offset: (index * PAGE) as u64, length: PAGE };
            client.dma_map(Iova((index * PAGE) as u64), part, Access::ReadWrite, Sharing::Descriptor)
        };
        map(0).unwrap();
        map(1).unwrap();
        assert_eq!(refused(map(2)), Errno::ENOSPC);
    });
}

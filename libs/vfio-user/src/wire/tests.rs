use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use zerocopy::FromBytes;

use super::*;
use crate::limits;
use crate::memory::Access;

fn header_of(message: &[u8]) -> (Header, &[u8]) {
    let (header, body) = Header::read_from_prefix(message).unwrap();
    assert_eq!(header.size() as usize, message.len());
    (header, body)
}

/// A command with what it borrows.
#[derive(Clone, Debug)]
enum Owned {
    Plain(Command<'static>),
    SetIrqsBool(u32, u32, Vec<u8>, IrqAction),
    RegionWrite(u64, u32, Vec<u8>),
    Writes(Vec<(u64, u32, Vec<u8>)>),
    DmaWrite(u64, Vec<u8>),
    Migration(u16, Vec<u8>),
}

impl Owned {
    fn with<R>(&self, f: impl FnOnce(Command<'_>) -> R) -> R {
        match self {
            Self::Plain(command) => f(command.clone()),
            Self::SetIrqsBool(index, start, data, action) => f(Command::SetIrqs(SetIrqs {
                index: IrqIndex(*index),
                start: *start,
                count: data.len() as u32,
                data: IrqData::Bool(data),
                action: *action,
            })),
            Self::RegionWrite(offset, region, data) => {
                f(Command::RegionWrite(RegionWrite { offset: *offset, region: *region, data }))
            }
            Self::Writes(writes) => {
                let writes: Vec<_> = writes
                    .iter()
                    .map(|(offset, region, data)| RegionWrite { offset: *offset, region: *region, data })
                    .collect();
                let body = RegionWrites::body(&writes).unwrap();
                f(Command::RegionWriteMulti(RegionWrites::decode(&body).unwrap()))
            }
            Self::DmaWrite(address, data) => f(Command::DmaWrite(DmaWrite { address: *address, data })),
            Self::Migration(code, body) => f(Command::Migration { code: CommandCode(*code), body }),
        }
    }
}

fn capabilities() -> impl Strategy<Value = Capabilities> {
    let twin = (any::<bool>(), option::of(any::<u32>()))
        .prop_map(|(supported, fd_index)| TwinSocket { supported, fd_index });
    (
        option::of(0..=limits::PEER_DESCRIPTORS),
        option::of(1..=u64::MAX),
        option::of(any::<u64>()),
        option::of(any::<u64>()),
        option::of(any::<bool>()),
        option::of(twin),
        option::of(any::<bool>()),
        option::of(iova_ranges()),
    )
        .prop_map(
            |(
                max_msg_fds,
                max_data_xfer_size,
                max_dma_maps,
                pgsizes,
                write_multiple,
                twin_socket,
                msix_direct,
                iova_ranges,
            )| {
                Capabilities {
                    max_msg_fds,
                    max_data_xfer_size,
                    max_dma_maps,
                    pgsizes,
                    write_multiple,
                    twin_socket,
                    msix_direct,
                    iova_ranges,
                }
            },
        )
}

fn iova_ranges() -> impl Strategy<Value = IovaRanges> {
    let range = any::<(u64, u64)>().prop_map(|(one, other)| (one.min(other), one.max(other)));
    prop_oneof![
        any::<bool>().prop_map(IovaRanges::Asked),
        proptest::collection::vec(range, 0..20).prop_map(IovaRanges::Usable),
    ]
}

fn version() -> impl Strategy<Value = Version> {
    (any::<u16>(), capabilities()).prop_map(|(minor, capabilities)| Version { minor, capabilities })
}

fn access() -> impl Strategy<Value = Access> {
    prop_oneof![Just(Access::Read), Just(Access::Write), Just(Access::ReadWrite)]
}

fn action() -> impl Strategy<Value = IrqAction> {
    prop_oneof![Just(IrqAction::Mask), Just(IrqAction::Unmask), Just(IrqAction::Trigger)]
}

/// A start and a size whose sum does not wrap.
fn range() -> impl Strategy<Value = (u64, u64)> {
    any::<u64>().prop_flat_map(|start| (Just(start), 1..=(u64::MAX - start).max(1)))
}

fn dma_map() -> impl Strategy<Value = DmaMap> {
    let backing = prop_oneof![
        Just(Backing::Messages),
        any::<u64>().prop_map(|offset| Backing::Mapping { offset }),
        any::<u64>().prop_map(|offset| Backing::File { offset }),
    ];
    (range(), access(), backing).prop_map(|((address, size), access, backing)| DmaMap {
        address,
        size,
        access,
        backing,
    })
}

fn dma_unmap() -> impl Strategy<Value = DmaUnmap> {
    let target = prop_oneof![
        any::<(u64, u64)>().prop_map(|(address, size)| UnmapTarget::Range { address, size }),
        any::<(u64, u64)>().prop_map(|(address, size)| UnmapTarget::RangeWithDirtyBitmap { address, size }),
        Just(UnmapTarget::All),
    ];
    (24..=limits::ARGUMENT, target).prop_map(|(argsz, target)| DmaUnmap { argsz, target })
}

fn query(least: u32) -> impl Strategy<Value = Query> {
    (least..=limits::ARGUMENT, any::<u32>()).prop_map(|(argsz, index)| Query { argsz, index })
}

fn set_irqs() -> impl Strategy<Value = SetIrqs<'static>> {
    let data = prop_oneof![Just(IrqData::None), Just(IrqData::Eventfds), Just(IrqData::Unbind)];
    let some = (0_u32..3, 0..u32::MAX, 1..2048_u32, data, action()).prop_map(
        |(index, start, count, data, action)| SetIrqs {
            index: IrqIndex(index),
            start,
            count: count.min(u32::MAX - start),
            data,
            action,
        },
    );
    let disable = any::<u32>().prop_map(|index| SetIrqs {
        index: IrqIndex(index),
        start: 0,
        count: 0,
        data: IrqData::None,
        action: IrqAction::Trigger,
    });
    prop_oneof![some, disable]
}

fn region_access() -> impl Strategy<Value = RegionAccess> {
    (0..u64::MAX / 2, any::<u32>(), 0..=limits::DATA_TRANSFER)
        .prop_map(|(offset, region, count)| RegionAccess { offset, region, count })
}

fn dma_access() -> impl Strategy<Value = DmaAccess> {
    (0..u64::MAX / 2, 0..=limits::DATA_TRANSFER).prop_map(|(address, count)| DmaAccess { address, count })
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    vec(any::<u8>(), 0..300)
}

fn command() -> impl Strategy<Value = Owned> {
    let writes = vec((0..u64::MAX / 2, any::<u32>(), vec(any::<u8>(), 1..=8)), 1..=limits::MULTIPLE_WRITES);
    prop_oneof![
        version().prop_map(|version| Owned::Plain(Command::Version(version))),
        dma_map().prop_map(|map| Owned::Plain(Command::DmaMap(map))),
        dma_unmap().prop_map(|unmap| Owned::Plain(Command::DmaUnmap(unmap))),
        (16..=limits::ARGUMENT).prop_map(|argsz| Owned::Plain(Command::GetInfo { argsz })),
        query(32).prop_map(|query| Owned::Plain(Command::GetRegionInfo(query))),
        query(16).prop_map(|query| Owned::Plain(Command::GetRegionIoFds(query))),
        query(16).prop_map(|query| Owned::Plain(Command::GetIrqInfo(query))),
        set_irqs().prop_map(|set| Owned::Plain(Command::SetIrqs(set))),
        (0_u32..3, 0..u32::MAX / 2, vec(any::<u8>(), 1..64), action())
            .prop_map(|(index, start, data, action)| Owned::SetIrqsBool(index, start, data, action)),
        region_access().prop_map(|access| Owned::Plain(Command::RegionRead(access))),
        (0..u64::MAX / 2, any::<u32>(), bytes())
            .prop_map(|(offset, region, data)| Owned::RegionWrite(offset, region, data)),
        writes.prop_map(Owned::Writes),
        dma_access().prop_map(|access| Owned::Plain(Command::DmaRead(access))),
        (0..u64::MAX / 2, bytes()).prop_map(|(address, data)| Owned::DmaWrite(address, data)),
        Just(Owned::Plain(Command::Reset)),
        (16_u16..=18, bytes()).prop_map(|(code, body)| Owned::Migration(code, body)),
    ]
}

fn region_info() -> impl Strategy<Value = RegionInfo> {
    let area = any::<(u64, u64)>().prop_map(|(offset, size)| SparseArea { offset, size });
    let capability = prop_oneof![
        vec(area, 0..6).prop_map(RegionCapability::SparseMmap),
        any::<(u32, u32)>().prop_map(|(kind, subtype)| RegionCapability::Type { kind, subtype }),
        Just(RegionCapability::MsixMappable),
        (4..=u16::MAX).prop_map(|id| RegionCapability::Unknown { id }),
    ];
    (any::<u32>(), 0_u32..8, any::<u64>(), any::<u64>(), vec(capability, 0..5)).prop_map(
        |(index, flags, size, file_offset, capabilities)| RegionInfo {
            index,
            flags: RegionFlags(flags),
            size,
            file_offset,
            capabilities,
        },
    )
}

fn io_fds() -> impl Strategy<Value = IoFds> {
    let entry =
        any::<(u64, u64, u32, u32, u32, u64)>().prop_map(|(offset, size, descriptor, kind, flags, datum)| {
            IoFd { offset, size, descriptor, kind: IoFdKind(kind), flags, datum, shadow: None }
        });
    (any::<u32>(), vec(entry, 0..8)).prop_map(|(index, entries)| IoFds::new(index, entries))
}

#[derive(Clone, Debug)]
enum OwnedReply {
    Plain(Reply<'static>),
    RegionRead(u64, u32, Vec<u8>),
    DmaRead(u64, Vec<u8>),
}

impl OwnedReply {
    fn get(&self) -> Reply<'_> {
        match self {
            Self::Plain(reply) => reply.clone(),
            Self::RegionRead(offset, region, data) => {
                Reply::RegionRead { offset: *offset, region: *region, data }
            }
            Self::DmaRead(address, data) => Reply::DmaRead { address: *address, data },
        }
    }
}

fn reply() -> impl Strategy<Value = OwnedReply> {
    let done = prop_oneof![
        Just(CommandCode::DMA_MAP),
        Just(CommandCode::DEVICE_SET_IRQS),
        Just(CommandCode::DEVICE_RESET)
    ];
    prop_oneof![
        version().prop_map(|version| OwnedReply::Plain(Reply::Version(version))),
        done.prop_map(|code| OwnedReply::Plain(Reply::Done(code))),
        dma_unmap().prop_map(|unmap| OwnedReply::Plain(Reply::DmaUnmap(unmap))),
        any::<(u32, u32, u32)>().prop_map(|(flags, regions, interrupts)| {
            OwnedReply::Plain(Reply::Info(DeviceInfo { flags: DeviceFlags(flags), regions, interrupts }))
        }),
        (region_info(), any::<u32>())
            .prop_map(|(info, argsz)| OwnedReply::Plain(Reply::RegionInfo { info, argsz })),
        (io_fds(), 0..400_u32).prop_map(|(fds, argsz)| OwnedReply::Plain(Reply::region_io_fds(fds, argsz))),
        any::<(u32, u32, u32)>().prop_map(|(index, flags, count)| {
            OwnedReply::Plain(Reply::IrqInfo(IrqInfo {
                index: IrqIndex(index),
                flags: IrqFlags(flags),
                count,
            }))
        }),
        (0..u64::MAX / 2, any::<u32>(), bytes())
            .prop_map(|(offset, region, data)| OwnedReply::RegionRead(offset, region, data)),
        region_access().prop_map(|access| OwnedReply::Plain(Reply::RegionWrite(access))),
        any::<u64>().prop_map(|count| OwnedReply::Plain(Reply::RegionWriteMulti { count })),
        (0..u64::MAX / 2, bytes()).prop_map(|(address, data)| OwnedReply::DmaRead(address, data)),
        option::of(dma_access()).prop_map(|access| OwnedReply::Plain(Reply::DmaWrite(access))),
    ]
}

proptest! {
    #[test]
    fn commands_survive_the_wire(owned in command(), id: u16, no_reply: bool) {
        owned.with(|command| {
            let message = command.encode(id, no_reply);
            let (header, body) = header_of(&message);
            assert_eq!((header.id(), header.code()), (id, command.code()));
            assert_eq!(header.kind(), Kind::Command { no_reply });
            assert_eq!(Command::decode(&header, body, command.descriptors()).unwrap(), command);
            assert!(message.len() <= limits::MESSAGE as usize);
        });
    }

    #[test]
    fn replies_survive_the_wire(owned in reply(), id: u16) {
        let reply = owned.get();
        let message = reply.encode(id);
        let (header, body) = header_of(&message);
        assert_eq!((header.id(), header.code()), (id, reply.code()));
        assert_eq!(header.kind(), Kind::Reply { error: None });
        assert_eq!(Reply::decode(header.code(), body).unwrap(), reply);
    }

    /// Also messages that are nearly right: those find what random bytes never reach.
    #[test]
    fn what_decodes_encodes_to_the_same(
        owned in command(), cut in 0..400_usize, at in 0..400_usize, byte: u8, descriptors in 0..4_usize,
    ) {
        let mut message = owned.with(|command| command.encode(1, false));
        if let Some(place) = message.get_mut(at + HEADER_SIZE) {
            *place = byte;
        }
        let (header, body) = Header::read_from_prefix(&message).unwrap();
        for body in [body, &body[..cut.min(body.len())]] {
            stable(&header, body, descriptors);
        }
    }

    #[test]
    fn random_commands_do_no_harm(code in 0_u16..20, body in bytes(), descriptors in 0..4_usize) {
        stable(&Header::command(1, CommandCode(code), false, 0), &body, descriptors);
    }

    #[test]
    fn random_replies_do_no_harm(code in 0_u16..20, body in bytes()) {
        let _ = Reply::decode(CommandCode(code), &body);
    }

    #[test]
    fn damaged_replies_do_no_harm(owned in reply(), cut in 0..400_usize, at in 0..400_usize, byte: u8) {
        let mut message = owned.get().encode(1);
        if let Some(place) = message.get_mut(at + HEADER_SIZE) {
            *place = byte;
        }
        let (header, body) = Header::read_from_prefix(&message).unwrap();
        for body in [body, &body[..cut.min(body.len())]] {
            if let Ok(reply) = Reply::decode(header.code(), body) {
                let again = reply.encode(1);
                assert_eq!(Reply::decode(header.code(), &again[HEADER_SIZE..]).unwrap(), reply);
            }
        }
    }

    #[test]
    fn a_client_without_room_gets_the_fixed_part(info in region_info(), argsz in 32..300_u32) {
        let needed = info.encoded_size();
        let message = Reply::region_info(info.clone(), argsz).encode(1);
        let body = &message[HEADER_SIZE..];
        assert_eq!(body[..4], needed.to_le_bytes());
        let fits = needed <= argsz;
        assert_eq!(body.len(), if fits { needed as usize } else { 32 });
        let has = fits && !info.capabilities.is_empty();
        assert_eq!(body[4] & 8 != 0, has);
        assert_eq!(body[12..16], if has { 32_u32 } else { 0 }.to_le_bytes());
    }
}

/// What decodes, encodes to something that decodes to the same; what does not has an errno.
fn stable(header: &Header, body: &[u8], descriptors: usize) {
    match Command::decode(header, body, descriptors) {
        Ok(command) => {
            let again = command.encode(header.id(), false);
            let (header, body) = header_of(&again);
            assert_eq!(Command::decode(&header, body, command.descriptors()).unwrap(), command);
            assert_eq!(command.encode(header.id(), false), again);
        }
        Err(error) => assert!(error.errno() as i32 > 0),
    }
}

#[test]
fn headers_are_as_on_the_wire() {
    let message = encode_error(0x1234, CommandCode::REGION_READ, 22);
    assert_eq!(message, [0x34, 0x12, 9, 0, 16, 0, 0, 0, 0x21, 0, 0, 0, 22, 0, 0, 0]);
    let header = Header::read_from_bytes(&message).unwrap();
    assert_eq!(header.kind(), Kind::Reply { error: Some(22) });
    for (flags, kind) in [
        (0xffff_ffe0_u32, Kind::Command { no_reply: false }),
        (0x10, Kind::Command { no_reply: true }),
        (0x01, Kind::Reply { error: None }),
        (0x02, Kind::Invalid(2)),
        (0x0f, Kind::Invalid(15)),
    ] {
        let mut message = message.clone();
        message[8..12].copy_from_slice(&flags.to_le_bytes());
        assert_eq!(Header::read_from_bytes(&message).unwrap().kind(), kind);
    }
}

/// The sizes that clients with fixed expectations have (rust-vmm's, QEMU's).
#[test]
fn replies_have_the_sizes_that_clients_expect() {
    let access = RegionAccess { offset: 0, region: 0, count: 4 };
    let info = DeviceInfo { flags: DeviceFlags::PCI, regions: 9, interrupts: 5 };
    let irq = IrqInfo { index: IrqIndex::MSIX, flags: IrqFlags::EVENTFD, count: 1 };
    for (reply, size) in [
        (Reply::Done(CommandCode::DMA_MAP), 16),
        (Reply::DmaUnmap(DmaUnmap::new(UnmapTarget::All)), 40),
        (Reply::Info(info), 32),
        (Reply::region_info(RegionInfo::default(), 32), 48),
        (Reply::IrqInfo(irq), 32),
        (Reply::Done(CommandCode::DEVICE_SET_IRQS), 16),
        (Reply::RegionRead { offset: 0, region: 0, data: &[0; 4] }, 36),
        (Reply::RegionWrite(access), 32),
        (Reply::Done(CommandCode::DEVICE_RESET), 16),
    ] {
        assert_eq!(reply.encode(0).len(), size, "{reply:?}");
    }
}

#[test]
fn our_capabilities_fit_into_qemus_buffer() {
    let asked = Version { minor: 0, capabilities: Capabilities::default() };
    let message = Reply::Version(asked.answer(&Offer::default())).encode(0);
    // Header, version, 193 characters and a NUL.
    assert!(message.len() <= 16 + 4 + 193 + 1, "{}", message.len());
    assert_eq!(message.last(), Some(&0));
    // And so do those of a device behind an IOMMU that says yes to everything.
    let wide = Offer { pgsizes: !0xfff, iova_ranges: vec![(0, u64::MAX); 100], ..Offer::default() };
    let message = Reply::Version(asked.answer(&wide)).encode(0);
    assert!(message.len() <= 16 + 4 + 193 + 1, "{}", message.len());
    assert_eq!(asked.answer(&Offer::default()).minor, 0);
    assert_eq!(Version { minor: 9, ..asked }.answer(&Offer::default()).minor, 1);
}

/// QEMU, which asks for REGION_WRITE_MULTI with minor version 0, queues all that it sends when it gets it.
#[test]
fn many_writes_in_one_message_are_for_those_who_ask() {
    for (minor, write_multiple, answer) in
        [(0, Some(true), None), (1, None, None), (1, Some(false), None), (1, Some(true), Some(true))]
    {
        let capabilities = Capabilities { write_multiple, ..Capabilities::default() };
        assert_eq!(
            Version { minor, capabilities }.answer(&Offer::default()).capabilities.write_multiple,
            answer
        );
    }
}

#[test]
fn extensions_are_answered_to_those_who_proposed_them() {
    let msi_window = vec![(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)];
    let offer = Offer {
        pgsizes: 0x4020_1000,
        max_dma_maps: 100,
        msix_direct: false,
        iova_ranges: msi_window.clone(),
    };
    let answer = |text: &str| {
        let capabilities = decode_version(text.as_bytes()).unwrap();
        let Version { capabilities, .. } = Version { minor: 0, capabilities }.answer(&offer);
        assert_eq!((capabilities.pgsizes, capabilities.max_dma_maps), (Some(0x4020_1000), Some(100)));
        let text = Reply::Version(Version { minor: 0, capabilities: capabilities.clone() }).encode(0);
        (
            capabilities.msix_direct,
            capabilities.iova_ranges,
            String::from_utf8_lossy(&text[20..]).into_owned(),
        )
    };
    let proposal = |keys: &str| format!("{{\"capabilities\":{{{keys}}}}}\0");

    let (direct, ranges, text) = answer(&proposal(""));
    assert_eq!((direct, ranges), (None, None));
    assert!(!text.contains("outboard"), "{text}");

    let no = "\"x-outboard-msix-direct\":false,\"x-outboard-iova-ranges\":false";
    let (direct, ranges, _) = answer(&proposal(no));
    assert_eq!((direct, ranges), (None, None), "who says no does not ask");

    let (direct, ranges, text) = answer(&proposal("\"x-outboard-msix-direct\":true"));
    assert_eq!((direct, ranges), (Some(false), None));
    assert!(text.contains("\"x-outboard-msix-direct\":false"), "{text}");

    let (direct, ranges, text) = answer(&proposal("\"x-outboard-iova-ranges\":true"));
    assert_eq!((direct, ranges), (None, Some(IovaRanges::Usable(msi_window))));
    assert!(text.contains("\"x-outboard-iova-ranges\":[[0,4276092927],[4277141504,549755813887]]"), "{text}");
}

fn decode_version(text: &[u8]) -> Result<Capabilities, DecodeError> {
    let mut body = vec![0, 0, 1, 0];
    body.extend_from_slice(text);
    Version::decode(&body).map(|version| version.capabilities)
}

#[test]
fn every_peers_capabilities_are_understood() {
    let none = Capabilities::default();
    for text in
        ["", "{}\0", "{\"capabilities\":{}}\0", "{\"capabilities\":{\"migration\":{\"pgsize\":4096}}}\0"]
    {
        assert_eq!(decode_version(text.as_bytes()).unwrap(), none, "{text}");
    }
    assert_eq!((none.descriptors(), none.data_transfer(), none.dma_maps()), (1, 1 << 20, 65535));
    let qemu = "{\"capabilities\":{\"migration\":{\"max_bitmap_size\":268435456,\"pgsize\":4096},\
                \"max_msg_fds\":16,\"write_multiple\":true,\"max_data_xfer_size\":1048576,\
                \"max_dma_maps\":65535,\"pgsizes\":4096}}\0";
    let qemu = decode_version(qemu.as_bytes()).unwrap();
    assert_eq!((qemu.max_msg_fds, qemu.write_multiple, qemu.pgsizes), (Some(16), Some(true), Some(4096)));
    let twin = decode_version(b"{\"capabilities\":{\"twin_socket\":{\"supported\":true}}}\0").unwrap();
    assert_eq!(twin.twin_socket, Some(TwinSocket { supported: true, fd_index: None }));
}

#[test]
fn capabilities_that_mean_nothing_are_refused() {
    let deep = format!("{}{}\0", "[".repeat(5000), "]".repeat(5000));
    let long = format!("{{\"x\":\"{}\"}}\0", "x".repeat(1 << 20));
    for text in [
        "{}",
        "\0",
        "{\0",
        "[]x\0",
        "{\"capabilities\":[]}\0",
        "{\"capabilities\":1}\0",
        "{\"capabilities\":{\"max_msg_fds\":-1}}\0",
        "{\"capabilities\":{\"max_msg_fds\":1025}}\0",
        "{\"capabilities\":{\"max_msg_fds\":\"8\"}}\0",
        "{\"capabilities\":{\"max_data_xfer_size\":0}}\0",
        "{\"capabilities\":{\"max_data_xfer_size\":1e99}}\0",
        "{\"capabilities\":{\"max_data_xfer_size\":99999999999999999999}}\0",
        "{\"capabilities\":{\"pgsizes\":4096.5}}\0",
        "{\"capabilities\":{\"write_multiple\":1}}\0",
        "{\"capabilities\":{\"x-outboard-msix-direct\":1}}\0",
        "{\"capabilities\":{\"x-outboard-iova-ranges\":[[1]]}}\0",
        "{\"capabilities\":{\"x-outboard-iova-ranges\":[[2,1]]}}\0",
        &deep,
        &long,
    ] {
        let error = decode_version(text.as_bytes()).expect_err(&text[..text.len().min(60)]);
        assert_eq!(error.errno(), nix::errno::Errno::EINVAL);
    }
    let major = Version::decode(&[1, 0, 0, 0]);
    assert_eq!(major, Err(DecodeError::MajorVersion { major: 1 }));
    assert!(Version::decode(&[0, 0, 0]).is_err());
}

fn decode(code: CommandCode, fields: &[u32], descriptors: usize) -> Result<(), DecodeError> {
    let body: Vec<u8> = fields.iter().flat_map(|field| field.to_le_bytes()).collect();
    Command::decode(&Header::command(0, code, false, 0), &body, descriptors).map(drop)
}

#[test]
fn interrupts_are_set_consistently_or_not_at_all() {
    const NONE_TRIGGER: u32 = 0x21;
    const EVENTFD_TRIGGER: u32 = 0x24;
    let set = |fields: &[u32], descriptors| decode(CommandCode::DEVICE_SET_IRQS, fields, descriptors);
    // argsz, flags, index, start, count
    for (fields, descriptors) in [
        (&[20, NONE_TRIGGER, 2, 0, 0][..], 0),
        (&[20, EVENTFD_TRIGGER, 2, 5, 1], 0),
        (&[20, EVENTFD_TRIGGER, 2, 5, 16], 16),
        (&[20, 0x09, 0, 0, 1], 0),
        (&[20, 0x14, 0, 0, 1], 1),
        (&[20, EVENTFD_TRIGGER, 3, 0, 1], 1),
        (&[24, 0x22, 2, 0, 4, 1], 0),
    ] {
        assert_eq!(set(fields, descriptors), Ok(()), "{fields:?}");
    }
    for (fields, descriptors) in [
        (&[20, NONE_TRIGGER, 2, 0][..], 0),
        (&[19, NONE_TRIGGER, 2, 0, 1], 0),
        (&[20, 0x01, 2, 0, 1], 0),
        (&[20, 0x20, 2, 0, 1], 0),
        (&[20, 0x31, 2, 0, 1], 0),
        (&[20, 0x23, 2, 0, 1], 0),
        (&[20, 0x61, 2, 0, 1], 0),
        (&[20, NONE_TRIGGER, 2, 1, 0], 0),
        (&[20, 0x09, 2, 0, 0], 0),
        (&[20, EVENTFD_TRIGGER, 2, 0, 0], 0),
        (&[20, NONE_TRIGGER, 2, 284, u32::MAX], 0),
        (&[20, NONE_TRIGGER, 2, u32::MAX, 1], 0),
        (&[20, NONE_TRIGGER, 2, 0, 1], 1),
        (&[20, EVENTFD_TRIGGER, 2, 0, 2], 1),
        (&[20, EVENTFD_TRIGGER, 2, 0, 1], 2),
        (&[20, 0x22, 2, 0, 4, 1], 0),
        (&[24, 0x22, 2, 0, 3, 1], 0),
        (&[24, 0x22, 2, 0, 4, 1], 1),
        (&[20, 0x09, 3, 0, 1], 0),
        (&[20, EVENTFD_TRIGGER, 4, 0, 2], 2),
    ] {
        assert!(set(fields, descriptors).is_err(), "{fields:?}");
    }
}

#[test]
fn memory_is_mapped_consistently_or_not_at_all() {
    let map = |flags, size: u64, address: u64, descriptors| {
        let [size_low, size_high] = [size as u32, (size >> 32) as u32];
        let [low, high] = [address as u32, (address >> 32) as u32];
        decode(CommandCode::DMA_MAP, &[32, flags, 0, 0, low, high, size_low, size_high], descriptors)
    };
    for (flags, descriptors) in [(3, 0), (1, 1), (2, 1), (7, 1), (11, 1)] {
        assert_eq!(map(flags, 4096, 0, descriptors), Ok(()), "{flags}");
    }
    assert_eq!(map(3, 4096, 4096_u64.wrapping_neg(), 1), Ok(()));
    for (flags, descriptors) in [(0, 1), (4, 1), (7, 0), (11, 0), (15, 1), (19, 1), (3, 2)] {
        assert!(map(flags, 4096, 0, descriptors).is_err(), "{flags}");
    }
    assert!(map(3, 0, 0, 1).is_err());
    assert!(map(3, 4097, 4096_u64.wrapping_neg(), 1).is_err());

    let unmap = |flags, address, size| decode(CommandCode::DMA_UNMAP, &[24, flags, address, 0, size, 0], 0);
    assert_eq!(unmap(0, 0, 0), Ok(()), "unknown ranges are the table's to refuse");
    assert_eq!(unmap(2, 0, 0), Ok(()));
    for (flags, address, size) in [(2, 1, 0), (2, 0, 1), (3, 0, 0), (4, 0, 0)] {
        assert!(unmap(flags, address, size).is_err(), "{flags}");
    }
    assert!(decode(CommandCode::DMA_UNMAP, &[u32::MAX, 1, 0, 0, 0, 0], 0).is_err());
    // SPDK's client sends a descriptor along.
    assert_eq!(decode(CommandCode::DMA_UNMAP, &[24, 0, 0, 0, 0, 0], 1), Ok(()));
}

#[test]
fn unknown_commands_are_told_apart() {
    for code in [0, 14, 19, 999] {
        let error = Command::decode(&Header::command(0, CommandCode(code), false, 16), &[], 0).unwrap_err();
        assert_eq!(error.errno(), nix::errno::Errno::ENOSYS);
    }
}

#[test]
fn chains_of_capabilities_end() {
    let info = RegionInfo { capabilities: vec![RegionCapability::MsixMappable; 3], ..RegionInfo::default() };
    let message = Reply::region_info(info, 4096).encode(0);
    let body = &message[HEADER_SIZE..];
    assert!(Reply::decode(CommandCode::DEVICE_GET_REGION_INFO, body).is_ok());
    // The second capability points to itself, to the first, into the fixed part, past the end, into itself.
    for next in [40_u32, 32, 8, 56, 0xffff_fff8, 44] {
        let mut body = body.to_vec();
        body[44..48].copy_from_slice(&next.to_le_bytes());
        let result = Reply::decode(CommandCode::DEVICE_GET_REGION_INFO, &body);
        assert!(matches!(result, Err(ReplyError::CapabilityChain { .. })), "{next}: {result:?}");
    }
    // An area list that says it has more than there is.
    let info = RegionInfo {
        capabilities: vec![RegionCapability::SparseMmap(vec![SparseArea { offset: 0, size: 1 }])],
        ..RegionInfo::default()
    };
    let mut message = Reply::region_info(info, 4096).encode(0);
    message[16 + 32 + 8..16 + 32 + 12].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(Reply::decode(CommandCode::DEVICE_GET_REGION_INFO, &message[16..]).is_err());
}

#[test]
fn io_descriptors_of_both_layouts_are_understood() {
    let decode = |fields: &[u64], count: u32| {
        let length = 16 + 8 * fields.len() as u32;
        let mut body: Vec<u8> = [length, 0, 3, count].iter().flat_map(|field| field.to_le_bytes()).collect();
        fields.iter().for_each(|field| body.extend_from_slice(&field.to_le_bytes()));
        match Reply::decode(CommandCode::DEVICE_GET_REGION_IO_FDS, &body) {
            Ok(Reply::RegionIoFds { fds, argsz }) => {
                assert_eq!((argsz, fds.index, fds.count), (length, 3, count));
                Ok(fds.entries)
            }
            other => Err(format!("{other:?}")),
        }
    };
    let entry = |kind| IoFd {
        offset: 0x1000,
        size: 4,
        descriptor: 1,
        kind: IoFdKind(kind),
        flags: 1,
        datum: 0x77,
        shadow: None,
    };
    // The specification's: 40 bytes.
    let plain = [0x1000, 4, 1, 1, 0x77];
    assert_eq!(decode(&plain, 1).unwrap(), [entry(0)]);
    assert_eq!(decode(&[plain, plain].concat(), 2).unwrap(), [entry(0); 2]);
    // libvfio-user's: 48 bytes, of any kind.
    let long = |kind: u64| [0x1000, 4, kind << 32 | 1, 2 << 32 | 1, 0x55, 0x77];
    let shadow = IoFd { shadow: Some(Shadow { descriptor: 2, offset: 0x55 }), ..entry(2) };
    assert_eq!(decode(&long(2), 1).unwrap(), [shadow]);
    assert_eq!(decode(&[long(2), long(0)].concat(), 2).unwrap(), [shadow, entry(0)]);
    // No whole number of either.
    for (fields, count) in [(&plain[..4], 1), (&plain, 2), (&long(0), 2), (&plain, 0), (&plain, u32::MAX)] {
        assert!(decode(fields, count).is_err(), "{count} in {fields:?}");
    }
}

/// A reply that goes on after its end is none.
#[test]
fn replies_of_one_size_have_it() {
    let unmap = DmaUnmap::new(UnmapTarget::Range { address: 0, size: 4096 });
    let access = RegionAccess { offset: 0, region: 0, count: 4 };
    let irq = IrqInfo { index: IrqIndex::MSIX, flags: IrqFlags::EVENTFD, count: 1 };
    for reply in [
        Reply::Done(CommandCode::DMA_MAP),
        Reply::Done(CommandCode::DEVICE_SET_IRQS),
        Reply::Done(CommandCode::DEVICE_RESET),
        Reply::DmaUnmap(unmap),
        Reply::Info(DeviceInfo { flags: DeviceFlags::PCI, regions: 9, interrupts: 5 }),
        Reply::IrqInfo(irq),
        Reply::RegionWrite(access),
        Reply::RegionWriteMulti { count: 1 },
    ] {
        let message = reply.encode(0);
        let body = &message[HEADER_SIZE..];
        assert_eq!(Reply::decode(reply.code(), body), Ok(reply.clone()));
        let long = [body, &[0]].concat();
        assert_eq!(
            Reply::decode(reply.code(), &long),
            Err(ReplyError::Long { length: long.len(), expected: body.len() })
        );
    }
}

/// The strategies make what they are meant to.
#[test]
fn every_command_is_made() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let codes: std::collections::BTreeSet<_> = (0..1000)
        .map(|_| command().new_tree(&mut runner).unwrap().current().with(|command| command.code()))
        .collect();
    assert_eq!(codes.len(), 17);
}

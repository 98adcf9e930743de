//! What a peer may ask for, and where each number comes from.

use std::time::Duration;

/// The most data in one region access or DMA message, in bytes; the `max_data_xfer_size` that we announce.
pub const DATA_TRANSFER: u32 = 1 << 20;

/// The largest message, header included: a region write of [`DATA_TRANSFER`] bytes. libvfio-user has the same.
pub const MESSAGE: u32 = DATA_TRANSFER + 32;

/// The largest `argsz` that we take: what a reply to it may carry.
pub const ARGUMENT: u32 = 1 << 20;

/// The most writes in one REGION_WRITE_MULTI; QEMU's VFIO_USER_MULTI_MAX.
pub const MULTIPLE_WRITES: usize = 200;

/// The longest capabilities string of a VERSION message, its NUL included. Peers send some 200 bytes.
pub const CAPABILITIES: usize = 16 << 10;

/// The most descriptors with one message; the kernel's SCM_MAX_FD.
pub const DESCRIPTORS: usize = 253;

/// The `max_msg_fds` that we announce: QEMU refuses to go on at more than 16.
pub const ANNOUNCED_DESCRIPTORS: u32 = 16;

/// The largest `max_msg_fds` that we take from a peer; libvfio-user refuses the same.
pub const PEER_DESCRIPTORS: u32 = 1024;

/// The `max_dma_maps` that we announce; the protocol's default, and the most that QEMU takes.
pub const DMA_MAPS: u32 = 65535;

/// The most mappings of clients' memory in this process. The kernel's own limit (vm.max_map_count, 65530 unless
/// it was changed) must stay out of reach: who passes it cannot allocate any more, so one client would end all.
/// A session may have as many of them as are left free: alone a half, next to another one a third each, and there
/// is always some left for the next.
pub const WATCHED_MAPPINGS: usize = 32768;

/// The `pgsizes` that we announce: mappings are multiples of 4 KiB.
pub const PAGE_SIZES: u64 = 4096;

/// The most bytes in one DMA message of ours: QEMU cuts a reply that its socket does not take at once.
pub const DMA_MESSAGE: u32 = 64 << 10;

/// The most DMA messages of ours under way.
pub const DMA_MESSAGES: usize = 1024;

/// How long a command may take: QEMU gives up after 5 s, and a late reply would break its stream.
pub const REPLY: Duration = Duration::from_secs(4);

/// How long a client may take to negotiate: until then it holds a place that others wait for.
pub const HANDSHAKE: Duration = Duration::from_secs(10);

/// How long a client may be silent in the middle of a message. It is one sendmsg to everybody but an attacker.
pub const STALL: Duration = Duration::from_secs(10);

/// The most commands that wait for the one before them; then the socket is left alone.
pub const WAITING_COMMANDS: usize = 4096;

/// The most bytes of them, and of replies that the client does not take.
pub const WAITING_BYTES: usize = 4 << 20;

/// The most descriptors of them: more are left in the socket, where they are the client's.
pub const WAITING_DESCRIPTORS: usize = DESCRIPTORS;

/// The most descriptors that a client can make us have, beside those of its interrupts: one short of
/// [`WAITING_DESCRIPTORS`] in commands and in replies, and to each come those of one more; those of the command that
/// is executed, and of the message that arrives; those of replies that the socket holds (a message each, of a buffer
/// of some 200 KiB), which count for this user. And our own: socket, alarm, a spare.
pub const SESSION_DESCRIPTORS: usize = 7 * DESCRIPTORS + 8;

/// How long a session's thread looks at the socket before it sleeps: a wake-up across cores costs more than the
/// work that it is for.
pub const LOOK: Duration = Duration::from_micros(30);

/// What poll(2) counts in.
pub const POLL_GRAIN: Duration = Duration::from_millis(1);

/// The most bytes that are taken from a socket at once.
pub const RECEIPT: usize = 64 << 10;

/// The most regions that a client takes from a server; QEMU's limit.
pub const REGIONS: u32 = 100;

/// The most interrupt types that a client takes from a server; QEMU's limit.
pub const INTERRUPT_TYPES: u32 = 50;

/// The most vectors of a type that a client takes from a server: those of an MSI-X table.
pub const VECTORS: u32 = 2048;

/// How long a client's own thread leaves the socket to a caller that reads it.
pub const LINGER: Duration = Duration::from_micros(200);

/// The most commands of a batch that a client sends ahead of the answers: a message may have a descriptor, and of
/// those the kernel lets only RLIMIT_NOFILE be on their way (unix(7), ETOOMANYREFS).
pub const PIPELINED: usize = 64;

/// Longer than anybody waits.
pub const EVER: Duration = Duration::from_secs(365 * 24 * 3600);

//! What happens when mapped memory vanishes: the peer shrinks its file, or the host's memory fails.
//!
//! The next access is SIGBUS, which would end the process and with it every other session. [`install`] puts a
//! handler in its way: memory that was lost becomes private zeros, it is marked as lost, and whoever watches it
//! is woken and ends the guilty session. A fault anywhere else goes where it went before.
//!
//! The handler may run in the middle of anything, so it only loads and stores atomics, and calls mmap(2) and
//! write(2). A table of fixed size holds the mappings; who adds to it takes a lock, the handler none.

#![expect(unsafe_code, reason = "a signal handler, and the memory that it replaces")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use nix::errno::Errno;
use nix::libc;
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::limits;

/// Who is told when memory is lost: a descriptor to poll, and a flag that stays.
#[derive(Debug)]
pub struct Alarm {
    descriptor: EventFd,
    memory_lost: AtomicBool,
    /// How many mappings it watches; changed under the lock of the free slots.
    watched: AtomicUsize,
}

impl Alarm {
    /// Nothing is lost.
    ///
    /// # Errors
    /// What eventfd(2) says.
    pub fn new() -> io::Result<Self> {
        let descriptor = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self { descriptor, memory_lost: AtomicBool::new(false), watched: AtomicUsize::new(0) })
    }

    /// Wakes who polls it, for whatever reason.
    pub fn ring(&self) {
        // A full counter wakes as well.
        let _ = self.descriptor.write(1);
    }

    /// Makes the descriptor quiet again.
    pub fn hush(&self) {
        let _ = self.descriptor.read();
    }

    /// Whether any of the memory that it watches was lost.
    pub fn memory_lost(&self) -> bool {
        self.memory_lost.load(Ordering::Acquire)
    }
}

impl AsFd for Alarm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// A session has its share of this process's mappings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{watched} mappings are this client's share: it leaves {left} of this process's {limit} to others", limit = limits::WATCHED_MAPPINGS)]
pub struct ShareError {
    /// How many the session has.
    pub watched: usize,
    /// How many nobody has.
    pub left: usize,
}

impl From<ShareError> for io::Error {
    fn from(error: ShareError) -> Self {
        Self::new(io::ErrorKind::StorageFull, error)
    }
}

/// Where a mapping is. `version` is odd while the rest is being changed.
struct Slot {
    version: AtomicUsize,
    start: AtomicUsize,
    length: AtomicUsize,
    lost: AtomicBool,
    alarm: AtomicPtr<Alarm>,
}

static SLOTS: [Slot; limits::WATCHED_MAPPINGS] = [const {
    Slot {
        version: AtomicUsize::new(0),
        start: AtomicUsize::new(0),
        length: AtomicUsize::new(0),
        lost: AtomicBool::new(false),
        alarm: AtomicPtr::new(std::ptr::null_mut()),
    }
}; limits::WATCHED_MAPPINGS];

/// How many slots were ever used: as far as the handler has to look.
static USED: AtomicUsize = AtomicUsize::new(0);

/// Slots that were used and are free.
static FREE: Mutex<Vec<&'static Slot>> = Mutex::new(Vec::new());

impl Slot {
    /// Takes a free slot for one of `alarm`'s mappings, unless it has more than it leaves to others.
    fn take(alarm: &Alarm) -> Result<&'static Self, ShareError> {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        let used = USED.load(Ordering::Relaxed);
        let left = limits::WATCHED_MAPPINGS.saturating_sub(used).saturating_add(free.len());
        let watched = alarm.watched.load(Ordering::Relaxed);
        let full = ShareError { watched, left };
        if watched >= left {
            return Err(full);
        }
        let slot = match free.pop() {
            Some(slot) => slot,
            None => {
                let slot = SLOTS.get(used).ok_or(full)?;
                USED.store(used.saturating_add(1), Ordering::Release);
                slot
            }
        };
        alarm.watched.store(watched.saturating_add(1), Ordering::Relaxed);
        Ok(slot)
    }

    /// Gives back what [`Slot::take`] gave.
    fn give_back(&'static self, alarm: &Alarm) {
        self.set(0, 0, std::ptr::null());
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        alarm.watched.store(alarm.watched.load(Ordering::Relaxed).saturating_sub(1), Ordering::Relaxed);
        free.push(self);
    }

    /// Only its owner changes a slot.
    fn set(&self, start: usize, length: usize, alarm: *const Alarm) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.length.store(length, Ordering::Relaxed);
        self.lost.store(false, Ordering::Relaxed);
        self.alarm.store(alarm.cast_mut(), Ordering::Relaxed);
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }

    /// The range, or `None` while it is being changed: then it is not the one that somebody accesses now.
    fn range(&self) -> Option<(usize, usize)> {
        let version = self.version.load(Ordering::Acquire);
        let range = (self.start.load(Ordering::Relaxed), self.length.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        (version & 1 == 0 && self.version.load(Ordering::Relaxed) == version).then_some(range)
    }

    fn holding(address: usize) -> Option<(&'static Self, usize, usize)> {
        SLOTS.iter().take(USED.load(Ordering::Acquire)).find_map(|slot| {
            let (start, length) = slot.range()?;
            address.checked_sub(start).filter(|&offset| offset < length).map(|_| (slot, start, length))
        })
    }
}

/// A mapping's place in the table, for as long as it is mapped.
pub(super) struct Guard {
    slot: &'static Slot,
    /// The handler reaches it through the slot.
    alarm: Arc<Alarm>,
}

impl std::fmt::Debug for Guard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guard").field("lost", &self.is_lost()).finish()
    }
}

impl Guard {
    /// Watches a range that was just mapped.
    ///
    /// # Errors
    /// [`ShareError`]
    pub(super) fn new(start: usize, length: usize, alarm: Arc<Alarm>) -> Result<Self, ShareError> {
        let slot = Slot::take(&alarm)?;
        slot.set(start, length, Arc::as_ptr(&alarm));
        Ok(Self { slot, alarm })
    }

    pub(super) fn is_lost(&self) -> bool {
        // After the loads from the memory that the caller wants to know about.
        fence(Ordering::Acquire);
        self.slot.lost.load(Ordering::Relaxed)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.slot.give_back(&self.alarm);
    }
}

/// What SIGBUS did before.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Guards all watched mappings of this process, for good. For programs: a library does not touch signals.
///
/// # Errors
/// What sigaction(2) says.
pub fn install() -> io::Result<()> {
    static INSTALLED: Mutex<bool> = Mutex::new(false);
    let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    if *installed {
        return Ok(());
    }
    // SAFETY: sigaction is a C structure of integers, for which zero is valid.
    let mut previous: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: only asks, and writes to `previous`.
    Errno::result(unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut previous) })?;
    // Before the handler can run.
    PREVIOUS.get_or_init(|| previous);
    // SAFETY: as above.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_sigbus as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: the handler does nothing that a handler may not do, and its type is that of SA_SIGINFO.
    Errno::result(unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) })?;
    *installed = true;
    Ok(())
}

extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel gives every SA_SIGINFO handler valid information; `errno` is this thread's.
    let (address, code, errno) =
        unsafe { ((*info).si_addr() as usize, (*info).si_code, libc::__errno_location()) };
    // SAFETY: as above. The interrupted code must not see what our calls leave in it.
    let saved = unsafe { *errno };
    if code <= 0 {
        // A process's kill(2), which has no address. (std's handler would only take itself away, and us with it.)
        return end(signal);
    }
    let replaced = replace(address);
    // SAFETY: as above.
    unsafe { *errno = saved };
    if !replaced {
        pass_on(signal, info, context);
    }
}

/// Puts zeros where lost memory was, if it is watched.
fn replace(address: usize) -> bool {
    let Some((slot, start, length)) = Slot::holding(address) else { return false };
    // Before anybody can see the zeros.
    slot.lost.store(true, Ordering::SeqCst);
    // All of it, since a huge page cannot be replaced in parts, and the session is over anyway.
    // SAFETY: the range is one mapping of ours, which whoever accesses it keeps alive.
    let zeros = unsafe {
        libc::mmap(
            start as *mut libc::c_void,
            length,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
            -1,
            0,
        )
    };
    if zeros == libc::MAP_FAILED {
        return false;
    }
    // SAFETY: the mapping is alive, so its guard is, and that owns the alarm.
    if let Some(alarm) = unsafe { slot.alarm.load(Ordering::Relaxed).as_ref() } {
        alarm.memory_lost.store(true, Ordering::Release);
        let one = 1_u64;
        // SAFETY: writes 8 bytes of `one` to an eventfd that does not block.
        unsafe {
            libc::write(alarm.descriptor.as_fd().as_raw_fd(), (&raw const one).cast(), size_of::<u64>())
        };
    }
    true
}

/// Ends the process by this signal, when the handler returns.
fn end(signal: libc::c_int) {
    // SAFETY: plain values.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}

/// Does what would have been done without us.
fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // `install` has set it.
    let Some(previous) = PREVIOUS.get() else { return };
    if [libc::SIG_DFL, libc::SIG_IGN].contains(&previous.sa_sigaction) {
        end(signal);
    } else if previous.sa_flags & libc::SA_SIGINFO != 0 {
        // SAFETY: the flag says that the handler has this type.
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
            unsafe { std::mem::transmute(previous.sa_sigaction) };
        handler(signal, info, context);
    } else {
        // SAFETY: without the flag, a handler that is neither "default" nor "ignore" has this type.
        let handler: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(previous.sa_sigaction) };
        handler(signal);
    }
}

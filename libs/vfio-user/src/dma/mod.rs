//! A client's memory, as its device reaches it.
//!
//! [`Table`] says what is mapped; a [`View`] is one thread's way into it. Memory that came with a descriptor is
//! mapped here and accessed directly; the rest is reached by DMA_READ and DMA_WRITE messages, which may block
//! for as long as the transport allows. No view holds mapped memory while it waits for a message, so an unmap
//! never waits for the client that asked for it.

mod sync;
mod table;

use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use vm_memory::{Bytes, VolatileSlice};

pub use crate::memory::Access;
use crate::memory::Mapping;
use sync::Arc;
pub use table::{Entry, InsertError, Reader, Table};

/// An address in the client's DMA space, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Iova(pub u64);

/// Why memory could not be accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DmaError {
    /// Some of it is not mapped, or not for this kind of access.
    #[error("{length} bytes at {iova:#x} are not mapped for this access", iova = iova.0)]
    NotMapped {
        /// The first byte.
        iova: Iova,
        /// How many.
        length: usize,
    },
    /// The client refused the message, or is gone.
    #[error("The client did not serve {length} bytes at {iova:#x}", iova = iova.0)]
    Refused {
        /// The first byte.
        iova: Iova,
        /// How many.
        length: usize,
    },
}

/// DMA by messages: what a [`View`] does with memory that has no descriptor.
pub trait Messages: Send + Sync {
    /// DMA_READ of any length; chunked as the client wishes.
    fn read(&self, from: Iova, into: &mut [u8]) -> Result<(), DmaError>;
    /// DMA_WRITE of any length.
    fn write(&self, to: Iova, from: &[u8]) -> Result<(), DmaError>;
    /// Whether the client can be asked at all.
    fn are_served(&self) -> bool;
}

type Release = Box<dyn FnOnce() + Send>;

/// The memory behind one DMA_MAP.
pub struct Region {
    /// `None`: reached by messages.
    mapping: Option<Mapping>,
    access: Access,
    release: Mutex<Option<Release>>,
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Region").field("mapping", &self.mapping).field("access", &self.access).finish()
    }
}

impl Region {
    /// Memory that is mapped here.
    pub fn mapped(mapping: Mapping, access: Access) -> Self {
        Self { mapping: Some(mapping), access, release: Mutex::new(None) }
    }

    /// Memory that is reached by messages.
    pub fn by_messages(access: Access) -> Self {
        Self { mapping: None, access, release: Mutex::new(None) }
    }

    /// What the client allows the device to do with it.
    pub fn access(&self) -> Access {
        self.access
    }

    /// The bytes, if they are mapped here.
    pub fn bytes(&self) -> Option<VolatileSlice<'_>> {
        self.mapping.as_ref().map(Mapping::bytes)
    }

    /// Whether the client has taken the memory away while it was mapped ([`crate::memory::guard`]). What was read
    /// of it lately may be zeros that nobody wrote.
    pub fn is_lost(&self) -> bool {
        self.mapping.as_ref().is_some_and(Mapping::is_lost)
    }

    /// Calls `release` when the last user has let go and the memory is unmapped.
    pub fn on_release(&self, release: impl FnOnce() + Send + 'static) {
        *self.release.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(release));
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        drop(self.mapping.take());
        if let Some(release) = self.release.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            release();
        }
    }
}

/// Client memory that stays mapped until this is dropped, for accesses that outlive a call (io_uring).
#[derive(Clone, Debug)]
pub struct Pin {
    region: Arc<Entry<Region>>,
    offset: usize,
    length: usize,
}

impl Pin {
    /// The pinned bytes; empty if they are none, which [`View::pin`] never makes.
    pub fn bytes(&self) -> Option<VolatileSlice<'_>> {
        self.region.value.bytes()?.subslice(self.offset, self.length).ok()
    }

    /// As [`Region::is_lost`]: ask before what was read of it is used.
    pub fn is_lost(&self) -> bool {
        self.region.value.is_lost()
    }
}

/// One thread's way into a client's memory.
pub struct View {
    reader: Reader<Region>,
    messages: std::sync::Arc<dyn Messages>,
}

/// What [`View::visit`] does with each run of memory that lies in one region.
enum Run<'a> {
    Mapped(VolatileSlice<'a>),
    ByMessages(Iova),
}

impl View {
    /// A view of `table`, whose regions without memory are reached through `messages`.
    pub fn new(table: Arc<Table<Region>>, messages: std::sync::Arc<dyn Messages>) -> Self {
        Self { reader: Reader::new(table), messages }
    }

    /// Lets go of memory that was unmapped. Call it between units of work.
    #[inline]
    pub fn refresh(&mut self) {
        self.reader.refresh();
    }

    /// Lets go of all memory, before a sleep.
    pub fn release(&mut self) {
        self.reader.release();
    }

    /// The mapped bytes at `iova`, if all lie in one region that allows `access` and is mapped here.
    #[inline]
    pub fn slice(&mut self, iova: Iova, length: usize, access: Access) -> Option<VolatileSlice<'_>> {
        self.find(iova, length, access).map(|(_, bytes)| bytes)
    }

    #[inline]
    fn find(&mut self, iova: Iova, length: usize, access: Access) -> Option<(&Region, VolatileSlice<'_>)> {
        let (entry, offset) = self.reader.find(iova.0, length)?;
        let region = &entry.value;
        if !allows(region.access, access) || region.is_lost() {
            return None;
        }
        Some((region, region.bytes()?.subslice(usize::try_from(offset).ok()?, length).ok()?))
    }

    /// Like [`View::slice`], but it stays mapped until the pin is dropped.
    pub fn pin(&mut self, iova: Iova, length: usize, access: Access) -> Option<Pin> {
        let (entry, offset) = self.reader.find(iova.0, length)?;
        let offset = usize::try_from(offset).ok()?;
        if !allows(entry.value.access, access) || entry.value.is_lost() {
            return None;
        }
        entry.value.bytes()?.subslice(offset, length).ok()?;
        Some(Pin { region: entry.clone(), offset, length })
    }

    /// Copies from the client's memory.
    ///
    /// # Errors
    /// [`DmaError`]; some of `into` may have been filled.
    #[inline]
    pub fn read(&mut self, iova: Iova, into: &mut [u8]) -> Result<(), DmaError> {
        let length = into.len();
        if let Some((region, bytes)) = self.find(iova, length, Access::Read) {
            bytes.copy_to(into);
            return if region.is_lost() { Err(DmaError::NotMapped { iova, length }) } else { Ok(()) };
        }
        let messages = self.messages.clone();
        self.visit(iova, length, Access::Read, |run, range| {
            let into = into.get_mut(range).unwrap_or_default();
            match run {
                Run::Mapped(bytes) => bytes.copy_to(into),
                Run::ByMessages(from) => return messages.read(from, into).map(|()| into.len()),
            };
            Ok(into.len())
        })
    }

    /// Whether the client, too, sees `bytes` at `iova`, where they were read through this view. It does not when it
    /// handed over the descriptor of memory that it has mapped privately, as QEMU does with `share=off`: nothing
    /// but asking tells. A client that cannot be asked, or refuses, is believed.
    pub fn confirm(&mut self, iova: Iova, bytes: &[u8]) -> bool {
        if self.slice(iova, bytes.len(), Access::Read).is_none() || !self.messages.are_served() {
            return true;
        }
        self.release();
        let mut theirs = vec![0; bytes.len()];
        match self.messages.read(iova, &mut theirs) {
            Ok(()) => theirs == bytes,
            Err(error) => {
                tracing::debug!(%error, "the client does not say what it sees");
                true
            }
        }
    }

    /// Copies to the client's memory.
    ///
    /// # Errors
    /// [`DmaError`]; some of it may have been written.
    #[inline]
    pub fn write(&mut self, iova: Iova, from: &[u8]) -> Result<(), DmaError> {
        if let Some(bytes) = self.slice(iova, from.len(), Access::Write) {
            bytes.copy_from(from);
            return Ok(());
        }
        let messages = self.messages.clone();
        self.visit(iova, from.len(), Access::Write, |run, range| {
            let from = from.get(range).unwrap_or_default();
            match run {
                Run::Mapped(bytes) => bytes.copy_from(from),
                Run::ByMessages(to) => messages.write(to, from)?,
            }
            Ok(from.len())
        })
    }

    /// Loads a naturally aligned little-endian dword (acquire).
    ///
    /// # Errors
    /// [`DmaError`]
    #[inline]
    pub fn load(&mut self, iova: Iova) -> Result<u32, DmaError> {
        if let Some(bytes) = self.slice(iova, 4, Access::Read)
            && let Ok(value) = bytes.load::<u32>(0, Ordering::Acquire)
        {
            return Ok(u32::from_le(value));
        }
        let mut bytes = [0; 4];
        self.read(iova, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Stores a naturally aligned little-endian dword (release).
    ///
    /// # Errors
    /// [`DmaError`]
    #[inline]
    pub fn store(&mut self, iova: Iova, value: u32) -> Result<(), DmaError> {
        if let Some(bytes) = self.slice(iova, 4, Access::Write)
            && bytes.store(value.to_le(), 0, Ordering::Release).is_ok()
        {
            return Ok(());
        }
        self.write(iova, &value.to_le_bytes())
    }

    /// Stores four dwords at a 16-byte aligned address; who sees the last one (load acquire) sees all.
    ///
    /// # Errors
    /// [`DmaError`]
    #[inline]
    pub fn publish(&mut self, iova: Iova, words: [u32; 4]) -> Result<(), DmaError> {
        let [first, second, third, last] = words;
        if let Some(bytes) = self.slice(iova, 16, Access::Write) {
            let low = u64::from(second) << 32 | u64::from(first);
            if bytes.store(low.to_le(), 0, Ordering::Relaxed).is_ok()
                && bytes.store(third.to_le(), 8, Ordering::Relaxed).is_ok()
                && bytes.store(last.to_le(), 12, Ordering::Release).is_ok()
            {
                return Ok(());
            }
        }
        let mut head = [0; 12];
        for (bytes, word) in head.chunks_exact_mut(4).zip([first, second, third]) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        self.write(iova, &head)?;
        self.store(Iova(iova.0.wrapping_add(12)), last)
    }

    /// Goes over a range region by region; `each` says how many bytes it did. Between two runs the memory may
    /// change hands, and while a message is under way nothing is held.
    #[cold]
    fn visit(
        &mut self,
        iova: Iova,
        length: usize,
        access: Access,
        mut each: impl FnMut(Run<'_>, std::ops::Range<usize>) -> Result<usize, DmaError>,
    ) -> Result<(), DmaError> {
        let missing = DmaError::NotMapped { iova, length };
        let mut done = 0_usize;
        while done < length {
            let at = iova.0.checked_add(done as u64).ok_or(missing)?;
            let (entry, offset) = self.reader.find(at, 1).ok_or(missing)?;
            let region = &entry.value;
            if !allows(region.access, access) || region.is_lost() {
                return Err(missing);
            }
            let room = entry.last().saturating_sub(at).saturating_add(1);
            let run = usize::try_from(room).unwrap_or(usize::MAX).min(length.saturating_sub(done));
            let range = done..done.saturating_add(run);
            let did = match region.bytes() {
                Some(bytes) => {
                    let offset = usize::try_from(offset).map_err(|_| missing)?;
                    let did = each(Run::Mapped(bytes.subslice(offset, run).map_err(|_| missing)?), range)?;
                    if region.is_lost() {
                        return Err(missing);
                    }
                    did
                }
                None => {
                    self.reader.release();
                    each(Run::ByMessages(Iova(at)), range)?
                }
            };
            done = done.saturating_add(did);
        }
        Ok(())
    }
}

fn allows(granted: Access, wanted: Access) -> bool {
    (granted.reads() || !wanted.reads()) && (granted.writes() || !wanted.writes())
}

#[cfg(test)]
mod tests;

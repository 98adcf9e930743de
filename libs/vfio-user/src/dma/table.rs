//! Which ranges a client has mapped, and who still uses them.
//!
//! A [`Table`] is changed by the session and read by the device's threads. A [`Reader`] looks things up in an
//! immutable snapshot: no lock, no shared counter. It learns of removals by calling [`Reader::refresh`], one
//! load when nothing changed. A removed entry is dropped when the last snapshot that holds it and the last
//! [`Arc`] that a reader took of it are gone, on whichever thread that happens; its own `Drop` tells the world.
//! So "the unmap is answered when the last access has ended" is what ownership does, not a protocol of flags.
//! `tests/loom.rs` holds a model of it.

use std::collections::BTreeMap;
use std::ops::Bound;

use nix::errno::Errno;

use super::sync::{Arc, AtomicU64, Mutex, Ordering, lock};

/// A range and what lies behind it.
#[derive(Debug)]
pub struct Entry<M> {
    start: u64,
    last: u64,
    /// What lies behind the range.
    pub value: M,
}

impl<M> Entry<M> {
    /// The first address.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// The last address (inclusive: a range may end at 2^64 - 1).
    pub fn last(&self) -> u64 {
        self.last
    }

    /// Where `length` bytes (not 0) at `address` lie inside the entry, if they all do.
    #[inline]
    pub fn offset_of(&self, address: u64, length: usize) -> Option<u64> {
        let offset = address.checked_sub(self.start)?;
        let last = address.checked_add((length as u64).checked_sub(1)?)?;
        (last <= self.last).then_some(offset)
    }
}

/// Why a range cannot be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InsertError {
    /// A size of 0, or a range that passes the end of the address space.
    #[error("The range {start:#x}+{size:#x} is empty or wraps around")]
    Range {
        /// First address.
        start: u64,
        /// Length in bytes.
        size: u64,
    },
    /// Some address of it is mapped already.
    #[error("The range {start:#x}+{size:#x} overlaps one that is mapped")]
    Overlap {
        /// First address.
        start: u64,
        /// Length in bytes.
        size: u64,
    },
    /// The table is full.
    #[error("The limit of {limit} ranges is reached")]
    Full {
        /// How many entries fit.
        limit: usize,
    },
}

impl InsertError {
    /// What the client gets.
    pub fn errno(self) -> Errno {
        match self {
            Self::Range { .. } => Errno::EINVAL,
            // What the specification says; libvfio-user says EINVAL, and takes an identical map again.
            Self::Overlap { .. } => Errno::EEXIST,
            Self::Full { .. } => Errno::ENOSPC,
        }
    }
}

type Snapshot<M> = Arc<Vec<Arc<Entry<M>>>>;

struct Master<M> {
    entries: BTreeMap<u64, Arc<Entry<M>>>,
    /// Made when a reader asks for it, so that a burst of changes costs one copy, not one each.
    snapshot: Option<Snapshot<M>>,
}

/// The ranges that are mapped now.
pub struct Table<M> {
    master: Mutex<Master<M>>,
    limit: usize,
    /// Counts removals: readers that see it unchanged hold nothing that was removed.
    removals: AtomicU64,
    /// Counts every change: a reader that misses looks here before it gives up.
    changes: AtomicU64,
}

impl<M> Table<M> {
    /// An empty table that takes at most `limit` ranges.
    pub fn new(limit: usize) -> Self {
        Self {
            master: Mutex::new(Master { entries: BTreeMap::new(), snapshot: None }),
            limit,
            removals: AtomicU64::new(0),
            changes: AtomicU64::new(0),
        }
    }

    /// Adds `size` bytes from `start`.
    ///
    /// # Errors
    /// [`InsertError`]; the table is unchanged then.
    pub fn insert(&self, start: u64, size: u64, value: M) -> Result<Arc<Entry<M>>, InsertError> {
        let last = size
            .checked_sub(1)
            .and_then(|extent| start.checked_add(extent))
            .ok_or(InsertError::Range { start, size })?;
        let mut master = lock(&self.master);
        // The entries do not overlap, so the last one that begins at or before our end decides.
        if master.entries.range(..=last).next_back().is_some_and(|(_, entry)| entry.last >= start) {
            return Err(InsertError::Overlap { start, size });
        }
        if master.entries.len() >= self.limit {
            return Err(InsertError::Full { limit: self.limit });
        }
        let entry = Arc::new(Entry { start, last, value });
        master.entries.insert(start, entry.clone());
        master.snapshot = None;
        self.changes.fetch_add(1, Ordering::Release);
        Ok(entry)
    }

    /// Removes exactly this range and gives its entry, or `None` if no entry has these bounds.
    ///
    /// The entry lives on while readers use it.
    pub fn remove(&self, start: u64, size: u64) -> Option<Arc<Entry<M>>> {
        let last = start.checked_add(size.checked_sub(1)?)?;
        let mut master = lock(&self.master);
        if master.entries.get(&start)?.last != last {
            return None;
        }
        let entry = master.entries.remove(&start);
        self.removed(&mut master);
        entry
    }

    /// Removes everything.
    pub fn clear(&self) -> Vec<Arc<Entry<M>>> {
        let mut master = lock(&self.master);
        let entries = std::mem::take(&mut master.entries).into_values().collect();
        self.removed(&mut master);
        entries
    }

    fn removed(&self, master: &mut Master<M>) {
        master.snapshot = None;
        self.removals.fetch_add(1, Ordering::Release);
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// How many ranges are mapped.
    pub fn len(&self) -> usize {
        lock(&self.master).entries.len()
    }

    /// Whether nothing is mapped.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The entries as they are now, in order.
    pub fn entries(&self) -> Vec<Arc<Entry<M>>> {
        lock(&self.master).entries.values().cloned().collect()
    }

    /// The entry that holds `address`, for who looks rarely.
    pub fn find(&self, address: u64) -> Option<Arc<Entry<M>>> {
        let master = lock(&self.master);
        let (_, entry) = master.entries.range((Bound::Unbounded, Bound::Included(address))).next_back()?;
        (entry.last >= address).then(|| entry.clone())
    }
}

/// A thread's view of a [`Table`].
pub struct Reader<M> {
    table: Arc<Table<M>>,
    snapshot: Option<Snapshot<M>>,
    removals: u64,
    changes: u64,
    /// The index of the last hit: neighbouring accesses mostly go to the same range.
    hint: usize,
}

impl<M> Reader<M> {
    /// A reader that has looked at nothing yet, and so holds nothing.
    pub fn new(table: Arc<Table<M>>) -> Self {
        Self { table, snapshot: None, removals: 0, changes: 0, hint: 0 }
    }

    /// Lets go of what was removed from the table. Call it between units of work: until then an unmap waits.
    #[inline]
    pub fn refresh(&mut self) {
        if self.snapshot.is_some() && self.table.removals.load(Ordering::Acquire) != self.removals {
            self.snapshot = None;
        }
    }

    /// Lets go of everything, before a sleep.
    pub fn release(&mut self) {
        self.snapshot = None;
    }

    /// The entry that holds all of `length` bytes (not 0) at `address`, and their offset in it.
    #[inline]
    pub fn find(&mut self, address: u64, length: usize) -> Option<(&Arc<Entry<M>>, u64)> {
        let index = match self.search(address, length) {
            Some(index) => index,
            None => {
                if self.snapshot.is_some() && self.table.changes.load(Ordering::Acquire) == self.changes {
                    return None;
                }
                self.load();
                self.search(address, length)?
            }
        };
        self.hint = index;
        let entry = self.snapshot.as_ref()?.get(index)?;
        Some((entry, entry.offset_of(address, length)?))
    }

    #[inline]
    fn search(&self, address: u64, length: usize) -> Option<usize> {
        let entries = self.snapshot.as_ref()?;
        if entries.get(self.hint).is_some_and(|entry| entry.offset_of(address, length).is_some()) {
            return Some(self.hint);
        }
        let index = entries.partition_point(|entry| entry.start <= address).checked_sub(1)?;
        entries.get(index)?.offset_of(address, length).map(|_| index)
    }

    #[cold]
    fn load(&mut self) {
        // Dropped before the lock is taken: a drop may run what waits for a removed entry.
        self.snapshot = None;
        let mut master = lock(&self.table.master);
        // Under the lock, so the counters belong to this very snapshot.
        self.removals = self.table.removals.load(Ordering::Relaxed);
        self.changes = self.table.changes.load(Ordering::Relaxed);
        let Master { entries, snapshot } = &mut *master;
        self.snapshot =
            Some(snapshot.get_or_insert_with(|| Arc::new(entries.values().cloned().collect())).clone());
    }
}

//! A device's region, and what can be mapped of it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::sys::stat::{SFlag, fstat};

use crate::memory::{Access, Mapping};
use crate::wire::{RegionCapability, RegionFlags, RegionInfo, SparseArea};

/// A region of a device.
#[derive(Debug)]
pub struct Region {
    info: RegionInfo,
    file: Option<OwnedFd>,
}

/// Why a part of a region is not mapped. Accesses by messages still work.
#[derive(Debug, thiserror::Error)]
pub enum AreaError {
    /// It reaches past the region's end.
    #[error("The area {offset:#x}+{size:#x} leaves the region's {region:#x} bytes", offset = area.offset, size = area.size)]
    Outside {
        /// The area.
        area: SparseArea,
        /// The region's size.
        region: u64,
    },
    /// It overlaps another one.
    #[error("The area {offset:#x}+{size:#x} overlaps the one before it", offset = area.offset, size = area.size)]
    Overlap {
        /// The area.
        area: SparseArea,
    },
    /// The file ends before the area does: an access would be a SIGBUS.
    #[error("The area {offset:#x}+{size:#x} leaves the file's {file:#x} bytes", offset = area.offset, size = area.size)]
    File {
        /// The area.
        area: SparseArea,
        /// The file's size.
        file: u64,
    },
    /// The region cannot be mapped.
    #[error("The region has no descriptor to map")]
    NoDescriptor,
    /// What mmap(2) or fstat(2) says.
    #[error("The area cannot be mapped")]
    Map(#[from] io::Error),
}

impl Region {
    pub(super) fn new(info: RegionInfo, file: Option<OwnedFd>) -> Self {
        Self { info, file }
    }

    /// What the server says of it.
    pub fn info(&self) -> &RegionInfo {
        &self.info
    }

    /// In bytes; 0 for a region that the device does not have.
    pub fn size(&self) -> u64 {
        self.info.size
    }

    /// The file to map parts of, if they can be.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().filter(|_| self.info.flags.contains(RegionFlags::MMAP)).map(AsFd::as_fd)
    }

    /// Whether the page of the MSI-X table may be mapped.
    pub fn is_msix_mappable(&self) -> bool {
        self.info.capabilities.contains(&RegionCapability::MsixMappable)
    }

    /// The parts that can be mapped, in order: none, the whole region, or what the server says.
    ///
    /// # Errors
    /// [`AreaError::Outside`], [`AreaError::Overlap`]
    pub fn areas(&self) -> Result<Vec<SparseArea>, AreaError> {
        if self.file().is_none() {
            return Ok(Vec::new());
        }
        let whole = [SparseArea { offset: 0, size: self.info.size }];
        let mut areas = self.info.areas().unwrap_or(&whole).to_vec();
        areas.retain(|area| area.size != 0);
        areas.sort_by_key(|area| area.offset);
        let mut free = 0;
        for &area in &areas {
            if area.offset < free {
                return Err(AreaError::Overlap { area });
            }
            free = area
                .offset
                .checked_add(area.size)
                .filter(|&end| end <= self.info.size)
                .ok_or(AreaError::Outside { area, region: self.info.size })?;
        }
        Ok(areas)
    }

    /// Maps a part of the region. Its stores and loads reach the device, or memory that the device looks at.
    ///
    /// A file that the server can shrink can still take the memory away: its accesses are then a SIGBUS.
    ///
    /// # Errors
    /// [`AreaError`]
    pub fn map(&self, area: SparseArea, access: Access) -> Result<Mapping, AreaError> {
        let file = self.file().ok_or(AreaError::NoDescriptor)?;
        let outside = AreaError::Outside { area, region: self.info.size };
        let Some(start) = self.info.file_offset.checked_add(area.offset) else { return Err(outside) };
        let Some(end) = start.checked_add(area.size) else { return Err(outside) };
        let Ok(length) = usize::try_from(area.size) else { return Err(outside) };
        let stat = fstat(file).map_err(io::Error::from)?;
        let size = u64::try_from(stat.st_size).unwrap_or_default();
        // A device's file has no size, and only the device knows what it can map.
        if stat.st_mode & SFlag::S_IFMT.bits() == SFlag::S_IFREG.bits() && end > size {
            return Err(AreaError::File { area, file: size });
        }
        Ok(Mapping::new(file, start, length, access)?)
    }
}

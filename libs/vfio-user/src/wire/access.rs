//! Data in messages: REGION_READ, REGION_WRITE, REGION_WRITE_MULTI, DMA_READ, DMA_WRITE.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{DecodeError, field, split};
use crate::limits;

/// Which bytes of which region ("VFIO_USER_REGION_READ").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionAccess {
    /// The first byte; its sum with `count` does not wrap.
    pub offset: u64,
    /// The region's index.
    pub region: u32,
    /// In bytes, at most [`limits::DATA_TRANSFER`].
    pub count: u32,
}

/// Bytes for a region ("VFIO_USER_REGION_WRITE").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionWrite<'a> {
    /// The first byte; its sum with the data's length does not wrap.
    pub offset: u64,
    /// The region's index.
    pub region: u32,
    /// What to write.
    pub data: &'a [u8],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawRegion {
    offset: U64,
    region: U32,
    count: U32,
}

const _: () = assert!(size_of::<RawRegion>() == 16);

impl RegionAccess {
    pub(super) fn decode(body: &[u8]) -> Result<Self, DecodeError> {
        Ok(Self::split(body)?.0)
    }

    /// The access, and the data that follows it, which has to have the right length.
    pub(super) fn decode_with_data(body: &[u8]) -> Result<(Self, &[u8]), DecodeError> {
        let (access, data) = Self::split(body)?;
        check_data(data, access.count.into())?;
        Ok((access, data))
    }

    fn split(body: &[u8]) -> Result<(Self, &[u8]), DecodeError> {
        let (raw, rest) = split::<RawRegion>(body)?;
        let (offset, count) = (raw.offset.get(), raw.count.get());
        check_count(count.into())?;
        if offset.checked_add(count.into()).is_none() {
            return Err(DecodeError::Range { start: offset, count: count.into() });
        }
        Ok((Self { offset, region: raw.region.get(), count }, rest))
    }

    pub(super) fn encode(&self, body: &mut Vec<u8>) {
        let raw =
            RawRegion { offset: self.offset.into(), region: self.region.into(), count: self.count.into() };
        body.extend_from_slice(raw.as_bytes());
    }
}

impl<'a> RegionWrite<'a> {
    pub(super) fn decode(body: &'a [u8]) -> Result<Self, DecodeError> {
        let (access, data) = RegionAccess::decode_with_data(body)?;
        Ok(Self { offset: access.offset, region: access.region, data })
    }

    pub(super) fn encode(&self, body: &mut Vec<u8>) {
        self.access().encode(body);
        body.extend_from_slice(self.data);
    }

    /// Where it goes.
    pub fn access(&self) -> RegionAccess {
        RegionAccess { offset: self.offset, region: self.region, count: field(self.data.len()) }
    }
}

/// Small writes to regions, in order ("VFIO_USER_REGION_WRITE_MULTI").
#[derive(Clone, Copy, Debug)]
pub struct RegionWrites<'a>(&'a [RawMultiWrite]);

#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawMultiWrite {
    offset: U64,
    region: U32,
    count: U32,
    data: [u8; 8],
}

const _: () = assert!(size_of::<RawMultiWrite>() == 24);

impl<'a> RegionWrites<'a> {
    /// The writes, each of 1 to 8 bytes.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = RegionWrite<'a>> + use<'a> {
        self.0.iter().map(|raw| RegionWrite {
            offset: raw.offset.get(),
            region: raw.region.get(),
            data: raw.data(),
        })
    }

    pub(crate) fn decode(body: &'a [u8]) -> Result<Self, DecodeError> {
        let (count, rest) = split::<U64>(body)?;
        let wrong = DecodeError::Writes { count: count.get() };
        let count = usize::try_from(count.get()).map_err(|_| wrong.clone())?;
        if !(1..=limits::MULTIPLE_WRITES).contains(&count) {
            return Err(wrong);
        }
        let (writes, _) = <[RawMultiWrite]>::ref_from_prefix_with_elems(rest, count)
            .map_err(|_| DecodeError::Short { length: body.len(), needed: Self::encoded_size(count) })?;
        for write in writes {
            let count = u64::from(write.count.get());
            if write.data().is_empty() || write.offset.get().checked_add(count).is_none() {
                return Err(DecodeError::Range { start: write.offset.get(), count });
            }
        }
        Ok(Self(writes))
    }

    pub(super) fn encode(&self, body: &mut Vec<u8>) {
        body.extend_from_slice(&(self.0.len() as u64).to_le_bytes());
        body.extend_from_slice(self.0.as_bytes());
    }

    fn encoded_size(count: usize) -> usize {
        count.saturating_mul(size_of::<RawMultiWrite>()).saturating_add(size_of::<U64>())
    }

    /// The body of a message with these writes: as many as fit in one, each of at most 8 bytes.
    ///
    /// # Errors
    /// [`DecodeError::Writes`] and [`DecodeError::TooMuchData`] where they do not.
    pub fn body(writes: &[RegionWrite<'_>]) -> Result<Vec<u8>, DecodeError> {
        if !(1..=limits::MULTIPLE_WRITES).contains(&writes.len()) {
            return Err(DecodeError::Writes { count: writes.len() as u64 });
        }
        let mut body = Vec::with_capacity(Self::encoded_size(writes.len()));
        body.extend_from_slice(&(writes.len() as u64).to_le_bytes());
        for write in writes {
            let mut data = [0; 8];
            data.get_mut(..write.data.len())
                .ok_or(DecodeError::TooMuchData { count: write.data.len() as u64, limit: 8 })?
                .copy_from_slice(write.data);
            write.access().encode(&mut body);
            body.extend_from_slice(&data);
        }
        Ok(body)
    }
}

impl PartialEq for RegionWrites<'_> {
    /// Bytes past a write's length mean nothing.
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for RegionWrites<'_> {}

impl RawMultiWrite {
    /// Empty if the length is not valid.
    fn data(&self) -> &[u8] {
        usize::try_from(self.count.get()).ok().and_then(|count| self.data.get(..count)).unwrap_or_default()
    }
}

/// Which bytes of the client's memory ("VFIO_USER_DMA_READ").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaAccess {
    /// The first byte; its sum with `count` does not wrap.
    pub address: u64,
    /// In bytes, at most [`limits::DATA_TRANSFER`]. Eight bytes on the wire, as libvfio-user has it.
    pub count: u32,
}

/// Bytes for the client's memory ("VFIO_USER_DMA_WRITE").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaWrite<'a> {
    /// The first byte; its sum with the data's length does not wrap.
    pub address: u64,
    /// What to write.
    pub data: &'a [u8],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawDma {
    address: U64,
    count: U64,
}

const _: () = assert!(size_of::<RawDma>() == 16);

impl DmaAccess {
    pub(super) fn decode(body: &[u8]) -> Result<Self, DecodeError> {
        Ok(Self::split(body)?.0)
    }

    pub(super) fn decode_with_data(body: &[u8]) -> Result<(Self, &[u8]), DecodeError> {
        let (access, data) = Self::split(body)?;
        check_data(data, access.count.into())?;
        Ok((access, data))
    }

    fn split(body: &[u8]) -> Result<(Self, &[u8]), DecodeError> {
        let (raw, rest) = split::<RawDma>(body)?;
        let (address, count) = (raw.address.get(), raw.count.get());
        let count = check_count(count)?;
        if address.checked_add(count.into()).is_none() {
            return Err(DecodeError::Range { start: address, count: count.into() });
        }
        Ok((Self { address, count }, rest))
    }

    pub(super) fn encode(&self, body: &mut Vec<u8>) {
        let raw = RawDma { address: self.address.into(), count: u64::from(self.count).into() };
        body.extend_from_slice(raw.as_bytes());
    }
}

impl<'a> DmaWrite<'a> {
    pub(super) fn decode(body: &'a [u8]) -> Result<Self, DecodeError> {
        let (access, data) = DmaAccess::decode_with_data(body)?;
        Ok(Self { address: access.address, data })
    }

    pub(super) fn encode(&self, body: &mut Vec<u8>) {
        self.access().encode(body);
        body.extend_from_slice(self.data);
    }

    /// Where it goes.
    pub fn access(&self) -> DmaAccess {
        DmaAccess { address: self.address, count: field(self.data.len()) }
    }
}

fn check_count(count: u64) -> Result<u32, DecodeError> {
    u32::try_from(count)
        .ok()
        .filter(|&count| count <= limits::DATA_TRANSFER)
        .ok_or(DecodeError::TooMuchData { count, limit: limits::DATA_TRANSFER })
}

fn check_data(data: &[u8], count: u64) -> Result<(), DecodeError> {
    if data.len() as u64 == count {
        Ok(())
    } else {
        Err(DecodeError::DataLength { length: data.len(), count })
    }
}

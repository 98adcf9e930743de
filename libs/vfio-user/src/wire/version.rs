//! VERSION: the first message, in which both ends say what they can do.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use zerocopy::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{DecodeError, split};
use crate::limits;

/// VERSION, as a command and as a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// The minor version; the major one is always 0.
    pub minor: u16,
    /// What the sender can do. Absent keys and an absent document both mean the defaults.
    pub capabilities: Capabilities,
}

/// The minor version that we speak.
const MINOR: u16 = 1;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawVersion {
    major: U16,
    minor: U16,
}

const _: () = assert!(size_of::<RawVersion>() == 4);

/// What a peer can do ("Version Data"). `None` is a key that was not sent; the methods know the defaults.
/// Unknown keys, and `migration`, which the specification dropped but every peer sends, are passed over.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// How many descriptors the sender takes with one message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_msg_fds: Option<u32>,
    /// How many bytes of data the sender takes in one message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_data_xfer_size: Option<u64>,
    /// How many DMA mappings the sender keeps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_dma_maps: Option<u64>,
    /// The page sizes that the sender can map, a bit each.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pgsizes: Option<u64>,
    /// Whether the sender knows REGION_WRITE_MULTI. A server that says so makes QEMU queue all that it sends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_multiple: Option<bool>,
    /// A second socket for the server's commands.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub twin_socket: Option<TwinSocket>,
    /// An extension of ours. From a client: its guest writes the MSI-X table itself. From a server, which says it only
    /// to such a client: whether interrupts work that way.
    #[serde(rename = "x-outboard-msix-direct", skip_serializing_if = "Option::is_none")]
    pub msix_direct: Option<bool>,
    /// An extension of ours: where a client's DMA may lie.
    #[serde(rename = "x-outboard-iova-ranges", skip_serializing_if = "Option::is_none")]
    pub iova_ranges: Option<IovaRanges>,
}

/// Where a client's DMA may lie: the question, and the answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum IovaRanges {
    /// From a client: whether it asks.
    Asked(bool),
    /// From a server, to who asked: the first and the last address of each range, ascending; none if it does not matter.
    Usable(Vec<(u64, u64)>),
}

/// What a server says of its device in its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// As [`Capabilities::pgsizes`].
    pub pgsizes: u64,
    /// As [`Capabilities::max_dma_maps`].
    pub max_dma_maps: u32,
    /// Whether a guest may write the MSI-X table itself.
    pub msix_direct: bool,
    /// As in [`IovaRanges::Usable`].
    pub iova_ranges: Vec<(u64, u64)>,
}

impl Default for Offer {
    /// Of a device that is not behind an IOMMU.
    fn default() -> Self {
        Self {
            pgsizes: limits::PAGE_SIZES,
            max_dma_maps: limits::DMA_MAPS,
            msix_direct: true,
            iova_ranges: Vec::new(),
        }
    }
}

/// A second socket for the server's commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TwinSocket {
    /// Whether the sender wants it.
    #[serde(default)]
    pub supported: bool,
    /// Which descriptor of the reply it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fd_index: Option<u32>,
}

#[derive(Serialize)]
struct Document {
    capabilities: Capabilities,
}

impl Capabilities {
    /// What we announce, as a server and as a client: 105 characters of QEMU's 193 ("reply larger than recv
    /// buffer"), and only keys that every client knows.
    pub fn ours() -> Self {
        Self {
            max_msg_fds: Some(limits::ANNOUNCED_DESCRIPTORS),
            max_data_xfer_size: Some(limits::DATA_TRANSFER.into()),
            max_dma_maps: Some(limits::DMA_MAPS.into()),
            pgsizes: Some(limits::PAGE_SIZES),
            ..Self::default()
        }
    }

    /// How many descriptors the peer takes with one message.
    pub fn descriptors(&self) -> usize {
        self.max_msg_fds.and_then(|count| count.try_into().ok()).unwrap_or(1)
    }

    /// How many bytes of data both ends take in one message, not 0.
    pub fn data_transfer(&self) -> u32 {
        self.max_data_xfer_size
            .and_then(|size| size.try_into().ok())
            .unwrap_or(limits::DATA_TRANSFER)
            .min(limits::DATA_TRANSFER)
    }

    /// How many DMA mappings the peer keeps.
    pub fn dma_maps(&self) -> u64 {
        self.max_dma_maps.unwrap_or(65535)
    }

    /// Whether the peer, a client, serves DMA_READ and DMA_WRITE. No key says so: Cloud Hypervisor's client and
    /// SPDK's initiator take every message for the reply that they wait for, and are known by what they leave out.
    pub fn serve_dma(&self) -> bool {
        self.pgsizes.is_some()
    }

    /// Whether the peer, a client, says that its guest writes the MSI-X table itself.
    pub fn writes_msix(&self) -> bool {
        self.msix_direct == Some(true)
    }

    fn parse(text: &[u8]) -> Result<Self, DecodeError> {
        if text.is_empty() {
            return Ok(Self::default());
        }
        if text.len() > limits::CAPABILITIES {
            return Err(DecodeError::CapabilitiesLength { length: text.len() });
        }
        if text.last() != Some(&0) {
            return Err(DecodeError::CapabilitiesEnd);
        }
        let text = text.split(|&byte| byte == 0).next().unwrap_or_default();
        let wrong = |reason: String| DecodeError::Capabilities { reason };
        // By way of objects, for which a derived structure would take an array as well.
        let mut document: Map<String, Value> =
            serde_json::from_slice(text).map_err(|error| wrong(error.to_string()))?;
        match document.remove("capabilities") {
            None => Ok(Self::default()),
            Some(object @ Value::Object(_)) => {
                Self::deserialize(object).map_err(|error| wrong(error.to_string()))?.check()
            }
            Some(_) => Err(wrong("\"capabilities\" is no object".to_owned())),
        }
    }

    fn check(self) -> Result<Self, DecodeError> {
        if let Some(count) = self.max_msg_fds.filter(|&count| count > limits::PEER_DESCRIPTORS) {
            return Err(DecodeError::CapabilityValue { name: "max_msg_fds", value: count.into() });
        }
        if self.max_data_xfer_size == Some(0) {
            return Err(DecodeError::CapabilityValue { name: "max_data_xfer_size", value: 0 });
        }
        if let Some(IovaRanges::Usable(ranges)) = &self.iova_ranges
            && let Some(&(first, _)) = ranges.iter().find(|(first, last)| first > last)
        {
            return Err(DecodeError::CapabilityValue { name: "x-outboard-iova-ranges", value: first });
        }
        Ok(self)
    }
}

impl Version {
    /// What a client opens with.
    pub fn proposal() -> Self {
        Self { minor: MINOR, capabilities: Capabilities::ours() }
    }

    /// What a server answers: the lesser minor version (QEMU takes 0 only), and what we and the device can do.
    ///
    /// That REGION_WRITE_MULTI is among it, only those who ask for it hear, and not QEMU, which has minor version 0; and
    /// the extensions are for those who proposed them.
    pub fn answer(&self, offer: &Offer) -> Self {
        let Capabilities { write_multiple, ref iova_ranges, .. } = self.capabilities;
        let asked = self.minor > 0 && write_multiple == Some(true);
        let ranges = *iova_ranges == Some(IovaRanges::Asked(true));
        let capabilities = Capabilities {
            pgsizes: Some(offer.pgsizes),
            max_dma_maps: Some(offer.max_dma_maps.into()),
            write_multiple: asked.then_some(true),
            msix_direct: self.capabilities.writes_msix().then_some(offer.msix_direct),
            iova_ranges: ranges.then(|| IovaRanges::Usable(offer.iova_ranges.clone())),
            ..Capabilities::ours()
        };
        Self { minor: self.minor.min(MINOR), capabilities }
    }

    pub(super) fn decode(body: &[u8]) -> Result<Self, DecodeError> {
        let (raw, text) = split::<RawVersion>(body)?;
        if raw.major != 0 {
            return Err(DecodeError::MajorVersion { major: raw.major.get() });
        }
        Ok(Self { minor: raw.minor.get(), capabilities: Capabilities::parse(text)? })
    }

    pub(super) fn encode(&self, body: &mut Vec<u8>) {
        let raw = RawVersion { major: 0.into(), minor: self.minor.into() };
        body.extend_from_slice(raw.as_bytes());
        let document = Document { capabilities: self.capabilities.clone() };
        // Numbers and booleans under constant keys: there is nothing that can fail.
        body.extend_from_slice(serde_json::to_string(&document).unwrap_or_default().as_bytes());
        body.push(0);
    }
}

//! PCI functions as the kernel's sysfs shows them: what there is, what drives it, and how it comes into the hands of
//! vfio-pci and back.
//!
//! Nothing is remembered outside of the kernel: `driver_override` says that a function was handed over, and to take it
//! back is to clear that and let the kernel choose a driver, as it does at boot. So it makes no difference which
//! process, or which boot of it, does the one and which the other.

use std::fmt::Display;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Serialize, Serializer};
use thiserror::Error;

mod address;
mod disks;
mod holders;

pub use address::{Address, AddressError};
pub use holders::Holder;

/// The driver by which user space owns a function.
pub const VFIO_PCI: &str = "vfio-pci";

/// NVM Express I/O controllers (PCI Code and ID Assignment, section 1.9).
pub const NVME: u32 = 0x01_08_02;

/// Drivers that may share a group with one that user space owns: they do no DMA (the kernel's driver_managed_dma).
const HARMLESS: [&str; 3] = [VFIO_PCI, "pci-stub", "pcieport"];

/// Why a function is not handed over, taken back or served.
#[derive(Debug, Error)]
pub enum HostError {
    /// No function has the address.
    #[error("There is no PCI function {0}; `outboard-server vfio list` shows the drives of this machine")]
    Missing(Address),
    /// The IOMMU does not translate for it.
    #[error(
        "{0} is in no IOMMU group, so nothing would keep its DMA inside of the guest's memory; turn the IOMMU on in the \
         firmware (VT-d, AMD-Vi) and boot with intel_iommu=on (amd_iommu=off must not be there)"
    )]
    NoGroup(Address),
    /// Others in its group belong to the kernel.
    #[error(
        "{address} shares IOMMU group {group} with {}; user space owns a group whole: hand over these as well, or move \
         {address} to another slot", list(.mates)
    )]
    Shared {
        /// Which function.
        address: Address,
        /// Its group.
        group: u32,
        /// Who is in the way, each with a driver.
        mates: Vec<Mate>,
    },
    /// It was not handed over.
    #[error(
        "{address} is driven by {}, not by vfio-pci; hand it over with `outboard-server vfio bind {address}`",
        name(.driver)
    )]
    NotBound {
        /// Which function.
        address: Address,
        /// What drives it.
        driver: Option<String>,
    },
    /// There is nothing to take back.
    #[error("{address} is driven by {driver}, not by vfio-pci: there is nothing to take back")]
    Elsewhere {
        /// Which function.
        address: Address,
        /// What drives it.
        driver: String,
    },
    /// vfio-pci is not there.
    #[error("The kernel module vfio-pci is not loaded; load it with `modprobe vfio-pci`")]
    NoModule,
    /// The machine would lose what it uses.
    #[error("{address} is in use by this machine: {}; end that first", list(.uses))]
    InUse {
        /// Which function.
        address: Address,
        /// Which of its disks is what.
        uses: Vec<String>,
    },
    /// vfio-pci lets go of a function when every descriptor and mapping of it is gone, and whoever asks waits.
    #[error("{address} is held by {}; end that first", list(.holders))]
    Held {
        /// Which function.
        address: Address,
        /// Who.
        holders: Vec<Holder>,
    },
    /// The kernel did not bind it; it was given back to the driver that it had.
    #[error("vfio-pci does not take {0}; the kernel's log (dmesg) says why")]
    Refused(Address),
    /// A file of sysfs or procfs.
    #[error("{path} cannot be {verb}: {source}{}", hint(.source))]
    File {
        /// Which.
        path: PathBuf,
        /// What was tried.
        verb: &'static str,
        /// Why not.
        source: io::Error,
    },
}

fn list<T: Display>(items: &[T]) -> String {
    items.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}

fn name(driver: &Option<String>) -> &str {
    driver.as_deref().unwrap_or("nothing")
}

fn hint(error: &io::Error) -> &'static str {
    if error.kind() == io::ErrorKind::PermissionDenied { " (this is for root)" } else { "" }
}

/// Another function of an IOMMU group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Mate {
    /// Which.
    pub address: Address,
    /// What drives it.
    pub driver: Option<String>,
}

impl Display for Mate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (driven by {})", self.address, name(&self.driver))
    }
}

/// A PCI function of this machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Function {
    /// Where it is.
    pub address: Address,
    /// Base class, subclass and programming interface, as 0xBBSSPP.
    #[serde(serialize_with = "hexadecimal::<6, _, _>")]
    pub class: u32,
    /// Vendor ID.
    #[serde(serialize_with = "hexadecimal::<4, _, _>")]
    pub vendor: u16,
    /// Device ID.
    #[serde(serialize_with = "hexadecimal::<4, _, _>")]
    pub device: u16,
    /// What drives it.
    pub driver: Option<String>,
    /// Its IOMMU group.
    pub group: Option<u32>,
    /// The others of its group, in the order of their addresses.
    pub mates: Vec<Mate>,
}

/// As lspci -n has it.
fn hexadecimal<const DIGITS: usize, T, S>(value: &T, serializer: S) -> Result<S::Ok, S::Error>
where
    T: Copy + Into<u32>,
    S: Serializer,
{
    serializer.serialize_str(&format!("{:0DIGITS$x}", (*value).into()))
}

impl Function {
    /// The group by which user space can own the function.
    ///
    /// # Errors
    /// [`HostError::NoGroup`], [`HostError::NotBound`], [`HostError::Shared`]: what is in the way, the first of it.
    pub fn ready(&self) -> Result<u32, HostError> {
        let address = self.address;
        let group = self.group.ok_or(HostError::NoGroup(address))?;
        if self.driver.as_deref() != Some(VFIO_PCI) {
            return Err(HostError::NotBound { address, driver: self.driver.clone() });
        }
        let mates = self.in_the_way();
        if mates.is_empty() { Ok(group) } else { Err(HostError::Shared { address, group, mates }) }
    }

    /// The others of the group that would have to be handed over, too.
    pub fn in_the_way(&self) -> Vec<Mate> {
        let in_the_way =
            |mate: &&Mate| mate.driver.as_deref().is_some_and(|driver| !HARMLESS.contains(&driver));
        self.mates.iter().filter(in_the_way).cloned().collect()
    }
}

/// Where this machine's functions and processes are shown.
#[derive(Clone, Debug)]
pub struct Host {
    /// As `/sys`.
    pub sysfs: PathBuf,
    /// As `/proc`.
    pub procfs: PathBuf,
}

impl Default for Host {
    fn default() -> Self {
        Self { sysfs: "/sys".into(), procfs: "/proc".into() }
    }
}

impl Host {
    /// All NVMe functions, in the order of their addresses.
    ///
    /// # Errors
    /// [`HostError::File`]
    pub fn drives(&self) -> Result<Vec<Function>, HostError> {
        let mut drives = Vec::new();
        for address in addresses(&self.bus().join("devices"))? {
            match self.function(address) {
                Ok(function) if function.class == NVME => drives.push(function),
                // One that is pulled out meanwhile is no drive of this machine.
                Ok(_) | Err(HostError::Missing(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(drives)
    }

    /// What a function is at present.
    ///
    /// # Errors
    /// [`HostError::Missing`], [`HostError::File`]
    pub fn function(&self, address: Address) -> Result<Function, HostError> {
        let path = self.path(address);
        if !path.exists() {
            return Err(HostError::Missing(address));
        }
        let group = target(&path.join("iommu_group")).and_then(|name| name.parse().ok());
        let mut mates = Vec::new();
        if group.is_some() {
            for mate in addresses(&path.join("iommu_group/devices"))? {
                if mate != address {
                    mates.push(Mate { address: mate, driver: target(&self.path(mate).join("driver")) });
                }
            }
        }
        Ok(Function {
            address,
            class: number(&path.join("class"))?,
            vendor: number(&path.join("vendor"))?,
            device: number(&path.join("device"))?,
            driver: target(&path.join("driver")),
            group,
            mates,
        })
    }

    /// Takes a function from its driver and gives it to vfio-pci; does nothing to one that is there. Says what it is
    /// then, of which [`Function::ready`] may have more to tell.
    ///
    /// # Errors
    /// [`HostError`]
    pub fn bind(&self, address: Address) -> Result<Function, HostError> {
        let function = self.function(address)?;
        if function.driver.as_deref() == Some(VFIO_PCI) {
            return Ok(function);
        }
        if function.group.is_none() {
            return Err(HostError::NoGroup(address));
        }
        if !self.bus().join("drivers").join(VFIO_PCI).exists() {
            return Err(HostError::NoModule);
        }
        let uses = self.uses(address)?;
        if !uses.is_empty() {
            return Err(HostError::InUse { address, uses });
        }
        write(&self.path(address).join("driver_override"), VFIO_PCI)?;
        let given = self.exchange(&function);
        let function = self.function(address)?;
        if function.driver.as_deref() == Some(VFIO_PCI) {
            return Ok(function);
        }
        self.clear_override(address)?;
        self.exchange(&function)?;
        given.and(Err(HostError::Refused(address)))
    }

    /// Takes a function from vfio-pci and gives it to the driver that the kernel chooses for it. Says what it is then.
    ///
    /// # Errors
    /// [`HostError`]; [`HostError::Held`] rather than wait for others.
    pub fn unbind(&self, address: Address) -> Result<Function, HostError> {
        let function = self.function(address)?;
        if let Some(driver) = function.driver.as_ref().filter(|driver| *driver != VFIO_PCI) {
            return Err(HostError::Elsewhere { address, driver: driver.clone() });
        }
        let holders = self.holders(&function)?;
        if !holders.is_empty() {
            return Err(HostError::Held { address, holders });
        }
        self.clear_override(address)?;
        self.exchange(&function)?;
        self.function(address)
    }

    /// Takes a function from its driver, if it has one, and lets the kernel choose one.
    fn exchange(&self, function: &Function) -> Result<(), HostError> {
        let address = function.address.to_string();
        if function.driver.is_some() {
            write(&self.path(function.address).join("driver/unbind"), &address)?;
        }
        write(&self.bus().join("drivers_probe"), &address)
    }

    fn clear_override(&self, address: Address) -> Result<(), HostError> {
        write(&self.path(address).join("driver_override"), "\n")
    }

    fn bus(&self) -> PathBuf {
        self.sysfs.join("bus/pci")
    }

    fn path(&self, address: Address) -> PathBuf {
        self.bus().join("devices").join(address.to_string())
    }
}

/// The name of what a link leads to.
fn target(link: &Path) -> Option<String> {
    Some(fs::read_link(link).ok()?.file_name()?.to_string_lossy().into_owned())
}

fn error(path: &Path, verb: &'static str) -> impl FnOnce(io::Error) -> HostError {
    let path = path.to_owned();
    move |source| HostError::File { path, verb, source }
}

/// The names of a directory's entries; those of one that is not there are none.
fn entries(path: &Path) -> Result<Vec<String>, HostError> {
    let directory = match fs::read_dir(path) {
        Err(source) if source.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        directory => directory.map_err(error(path, "read"))?,
    };
    let name = |entry: io::Result<fs::DirEntry>| Ok(entry?.file_name().to_string_lossy().into_owned());
    directory.map(name).collect::<io::Result<_>>().map_err(error(path, "read"))
}

/// The functions that a directory has entries of, in order.
fn addresses(path: &Path) -> Result<Vec<Address>, HostError> {
    let mut addresses: Vec<Address> = entries(path)?.iter().filter_map(|name| name.parse().ok()).collect();
    addresses.sort();
    Ok(addresses)
}

/// What a file says in the form of 0x1b36.
fn number<T: TryFrom<u32>>(path: &Path) -> Result<T, HostError> {
    let text = fs::read_to_string(path).map_err(error(path, "read"))?;
    let value = text.trim().strip_prefix("0x").and_then(|digits| u32::from_str_radix(digits, 16).ok());
    value.and_then(|value| value.try_into().ok()).ok_or_else(|| {
        error(path, "read")(io::Error::new(io::ErrorKind::InvalidData, format!("it says {text:?}")))
    })
}

/// Writes to a file that is there.
fn write(path: &Path, text: &str) -> Result<(), HostError> {
    OpenOptions::new()
        .write(true)
        .truncate(true)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .map_err(error(path, "written"))
}

#[cfg(test)]
mod tests;

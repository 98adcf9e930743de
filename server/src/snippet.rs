//! What a VMM is told so that its guest has a drive: text to paste, quoted for where it goes.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde::Serialize;

#[cfg(test)]
mod tests;

/// A VMM, or what drives one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Vmm {
    /// A command line of QEMU 10.1 or newer.
    Qemu,
    /// What goes into the XML of a libvirt domain.
    Libvirt,
    /// A command line of Cloud Hypervisor.
    CloudHypervisor,
}

/// Why a VMM cannot be told.
#[derive(Debug, thiserror::Error)]
pub enum SnippetError {
    /// JSON is text.
    #[error("The socket's path {} is not UTF-8, and VMMs are told text; choose another one", path.display())]
    NotText {
        /// Which.
        path: PathBuf,
    },
    /// What Cloud Hypervisor's options cannot quote.
    #[error(
        "The socket's path {} has a quote or a bracket, or ends in a space, which Cloud Hypervisor cannot be told; \
         choose another one",
        path.display()
    )]
    Unspeakable {
        /// Which.
        path: PathBuf,
    },
}

/// `-device` of QEMU, as JSON.
#[derive(Serialize)]
struct Device<'a> {
    driver: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    socket: Address<'a>,
}

/// SocketAddress of QAPI.
#[derive(Serialize)]
struct Address<'a> {
    r#type: &'a str,
    path: &'a str,
}

/// What `vmm` is told of the drive that listens at `socket`, an absolute path.
///
/// # Errors
/// [`SnippetError`]
pub fn snippet(vmm: Vmm, name: Option<&str>, socket: &Path) -> Result<String, SnippetError> {
    let path = socket.to_str().ok_or_else(|| SnippetError::NotText { path: socket.into() })?;
    Ok(match vmm {
        Vmm::Qemu => format!(
            "qemu-system-x86_64 -machine q35,accel=kvm:tcg,memory-backend=memory -m 2G \\\n  \
             -object memory-backend-memfd,id=memory,size=2G,share=on \\\n  \
             -device {}\n",
            shell(&device(name, path))
        ),
        Vmm::Libvirt => format!(
            "<!-- For virsh edit: libvirt has no element for vfio-user devices, so that QEMU itself is told. -->\n\
             <domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\n  \
               <memoryBacking>\n    \
                 <source type='memfd'/>\n    \
                 <access mode='shared'/>\n  \
               </memoryBacking>\n  \
               <qemu:commandline>\n    \
                 <qemu:arg value='-device'/>\n    \
                 <qemu:arg value='{}'/>\n  \
               </qemu:commandline>\n\
             </domain>\n",
            xml(&device(name, path))
        ),
        Vmm::CloudHypervisor => {
            if path.contains(['"', '[', ']']) || path.ends_with(char::is_whitespace) {
                return Err(SnippetError::Unspeakable { path: socket.into() });
            }
            let id = name.map(|name| format!("id={name},")).unwrap_or_default();
            format!(
                "cloud-hypervisor --memory size=2G,shared=on \\\n  --user-device {}\n",
                shell(&format!("{id}socket=\"{path}\""))
            )
        }
    })
}

fn device(name: Option<&str>, path: &str) -> String {
    let socket = Address { r#type: "unix", path };
    let device = Device { driver: "vfio-user-pci", id: name, socket };
    // Strings always become JSON.
    serde_json::to_string(&device).unwrap_or_default()
}

/// One word of a shell.
fn shell(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// The value of an attribute.
fn xml(text: &str) -> String {
    let escapes = [('&', "&amp;"), ('<', "&lt;"), ('>', "&gt;"), ('\'', "&apos;")];
    escapes.iter().fold(text.to_owned(), |text, (character, escape)| text.replace(*character, escape))
}

//! The address of a PCI function.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};
use thiserror::Error;

/// Where a PCI function is: domain, bus, device and function, as in 0000:00:03.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

/// What is no address.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0:?} is no address of a PCI function; give one as in 0000:00:03.0 or 00:03.0")]
pub struct AddressError(String);

impl FromStr for Address {
    type Err = AddressError;

    /// Takes `DDDD:BB:DD.F`, and `BB:DD.F` for domain 0, as lspci does.
    fn from_str(text: &str) -> Result<Self, AddressError> {
        parse(text).ok_or_else(|| AddressError(text.into()))
    }
}

fn parse(text: &str) -> Option<Address> {
    let (rest, function) = text.rsplit_once('.')?;
    let (rest, device) = rest.rsplit_once(':')?;
    let (domain, bus) = rest.split_once(':').unwrap_or(("0", rest));
    Some(Address {
        // Those behind Intel's VMD have five digits.
        domain: hexadecimal(domain, 8)?,
        bus: hexadecimal(bus, 2)?.try_into().ok()?,
        device: hexadecimal(device, 2).filter(|device| *device < 32)?.try_into().ok()?,
        function: hexadecimal(function, 1).filter(|function| *function < 8)?.try_into().ok()?,
    })
}

/// Digits only: the library's parser would take a sign.
fn hexadecimal(text: &str, most: usize) -> Option<u32> {
    let digits = text.len() <= most && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if digits { u32::from_str_radix(text, 16).ok() } else { None }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function}")
    }
}

impl Serialize for Address {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_address_without_a_domain_is_in_domain_0() {
        assert_eq!("00:03.0".parse::<Address>(), "0000:00:03.0".parse());
        assert_eq!("10000:E1:1f.7".parse::<Address>().unwrap().to_string(), "10000:e1:1f.7");
    }

    #[test]
    fn what_is_no_address_is_said_so() {
        for wrong in [
            "",
            "03.0",
            "00:03",
            "00:20.0",
            "00:03.8",
            "100:03.0",
            "0:0:0:3.0",
            "00:+3.0",
            "00:03.0 ",
            ":03.0.",
            "::.",
            "nvme0",
            "../../x:00.0",
        ] {
            let error = wrong.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains(&format!("{wrong:?} is no address")), "{error}");
        }
    }

    proptest! {
        #[test]
        fn what_is_shown_is_read(domain: u32, bus: u8, device in 0..32_u8, function in 0..8_u8) {
            let address = Address { domain, bus, device, function };
            prop_assert_eq!(address.to_string().parse(), Ok(address));
        }

        #[test]
        fn any_text_has_an_answer(text in "[0-9a-f:.]{0,14}|.*") {
            if let Ok(address) = text.parse::<Address>() {
                prop_assert_eq!(address.to_string().parse(), Ok(address));
            }
        }
    }
}

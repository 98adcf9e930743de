//! What `outboard-server vfio list` shows.

use std::fmt::Write;

use serde::Serialize;

use super::host::{Function, VFIO_PCI};

/// A drive, and what keeps it from being served.
#[derive(Serialize)]
struct Listed<'a> {
    #[serde(flatten)]
    function: &'a Function,
    obstacle: Option<String>,
}

/// An array of JSON, an object for each drive: `address`, `class`, `vendor`, `device` (hexadecimal, as lspci -n has
/// them), `driver`, `group` (either may be null), `mates` (the others of its group, each with `address` and `driver`),
/// and `obstacle`, null for a drive that can be served and else what is in the way.
pub fn json(drives: &[Function]) -> String {
    let listed = |function| Listed { function, obstacle: obstacle(function) };
    let listed: Vec<_> = drives.iter().map(listed).collect();
    // Strings and numbers under constant keys: there is nothing that can fail.
    let mut text = serde_json::to_string_pretty(&listed).unwrap_or_default();
    text.push('\n');
    text
}

fn obstacle(function: &Function) -> Option<String> {
    function.ready().err().map(|error| error.to_string())
}

/// A table of the drives, and under it for each the commands that hand it over and take it back.
pub fn text(drives: &[Function]) -> String {
    if drives.is_empty() {
        return "This machine has no NVMe drive.\n".into();
    }
    let mut rows = vec![["ADDRESS", "CLASS", "IDS", "DRIVER", "GROUP", "SHARED WITH"].map(str::to_owned)];
    rows.extend(drives.iter().map(row));
    let mut widths = [0; 6];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.len().max(*width);
        }
    }
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        let line = cells.collect::<Vec<_>>().join("  ");
        text.push_str(line.trim_end());
        text.push('\n');
    }
    for drive in drives {
        text.push('\n');
        text.push_str(&commands(drive));
    }
    text
}

fn row(drive: &Function) -> [String; 6] {
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".into());
    let mates: Vec<_> = drive.mates.iter().map(ToString::to_string).collect();
    [
        drive.address.to_string(),
        format!("{:06x}", drive.class),
        format!("{:04x}:{:04x}", drive.vendor, drive.device),
        or_none(drive.driver.clone()),
        or_none(drive.group.map(|group| group.to_string())),
        or_none((!mates.is_empty()).then(|| mates.join(", "))),
    ]
}

/// What to do with a drive: sentences, and commands as they are typed.
fn commands(drive: &Function) -> String {
    let Function { address, .. } = drive;
    let Some(group) = drive.group else {
        return format!("{}.\n", obstacle(drive).unwrap_or_default());
    };
    let bound = drive.driver.as_deref() == Some(VFIO_PCI);
    let unbound = if bound { vec![] } else { vec![*address] };
    let missing: Vec<_> =
        unbound.into_iter().chain(drive.in_the_way().into_iter().map(|mate| mate.address)).collect();
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = match missing.as_slice() {
        [] => writeln!(
            text,
            "{address} can be served. To give its group to the user of a server, and to take it back:"
        ),
        _ => writeln!(
            text,
            "To hand {address} over, give its group to the user of a server, and take it back:"
        ),
    };
    if !missing.is_empty() {
        text.push_str("    modprobe vfio-pci\n");
    }
    for address in missing {
        let _ = writeln!(text, "    outboard-server vfio bind {address}");
    }
    let _ = writeln!(text, "    chown USER /dev/vfio/{group}");
    let _ = writeln!(text, "    outboard-server vfio unbind {address}");
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vfio::host::{Mate, NVME};

    fn drive(
        address: &str,
        driver: Option<&str>,
        group: Option<u32>,
        mates: &[(&str, Option<&str>)],
    ) -> Function {
        let mate = |&(address, driver): &(&str, Option<&str>)| Mate {
            address: address.parse().unwrap(),
            driver: driver.map(Into::into),
        };
        Function {
            address: address.parse().unwrap(),
            class: NVME,
            vendor: 0x1b36,
            device: 0x10,
            driver: driver.map(Into::into),
            group,
            mates: mates.iter().map(mate).collect(),
        }
    }

    #[test]
    fn the_table_stands_in_columns_and_the_commands_below() {
        let drives = [
            drive(
                "00:03.0",
                Some("nvme"),
                Some(5),
                &[("00:04.0", Some("e1000e")), ("00:01.0", Some("pcieport"))],
            ),
            drive("10000:01:00.0", Some("vfio-pci"), Some(12), &[]),
        ];
        assert_eq!(
            text(&drives),
            "\
ADDRESS        CLASS   IDS        DRIVER    GROUP  SHARED WITH
0000:00:03.0   010802  1b36:0010  nvme      5      0000:00:04.0 (driven by e1000e), 0000:00:01.0 (driven by pcieport)
10000:01:00.0  010802  1b36:0010  vfio-pci  12     -

To hand 0000:00:03.0 over, give its group to the user of a server, and take it back:
    modprobe vfio-pci
    outboard-server vfio bind 0000:00:03.0
    outboard-server vfio bind 0000:00:04.0
    chown USER /dev/vfio/5
    outboard-server vfio unbind 0000:00:03.0

10000:01:00.0 can be served. To give its group to the user of a server, and to take it back:
    chown USER /dev/vfio/12
    outboard-server vfio unbind 10000:01:00.0
"
        );
    }

    #[test]
    fn without_an_iommu_group_the_reason_stands_instead() {
        let shown = text(&[drive("00:03.0", Some("nvme"), None, &[])]);
        assert!(shown.contains("nvme    -      -\n\n0000:00:03.0 is in no IOMMU group"), "{shown}");
        assert!(!shown.contains("vfio bind"), "{shown}");
    }

    #[test]
    fn a_machine_without_drives_says_so() {
        assert_eq!(text(&[]), "This machine has no NVMe drive.\n");
        assert_eq!(json(&[]), "[]\n");
    }

    #[test]
    fn programs_read_what_is_in_the_way() {
        let shown = json(&[
            drive("00:03.0", None, Some(5), &[("00:04.0", None)]),
            drive("00:05.0", Some("vfio-pci"), Some(6), &[]),
        ]);
        let read: serde_json::Value = serde_json::from_str(&shown).unwrap();
        assert_eq!(
            read,
            serde_json::json!([
                {
                    "address": "0000:00:03.0", "class": "010802", "vendor": "1b36", "device": "0010", "driver": null,
                    "group": 5, "mates": [{"address": "0000:00:04.0", "driver": null}],
                    "obstacle": "0000:00:03.0 is driven by nothing, not by vfio-pci; hand it over with \
                                 `outboard-server vfio bind 0000:00:03.0`",
                },
                {
                    "address": "0000:00:05.0", "class": "010802", "vendor": "1b36", "device": "0010",
                    "driver": "vfio-pci", "group": 6, "mates": [], "obstacle": null,
                },
            ])
        );
    }
}

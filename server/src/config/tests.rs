use std::fs;

use super::*;
use crate::nvme::DoorbellMode;

fn parse(text: &str) -> Result<Vec<Entry>, String> {
    super::parse(Path::new("/etc/drives.toml"), text).map_err(|error| error.to_string())
}

#[test]
fn the_example_is_right() {
    let drives = parse(include_str!("example.toml")).unwrap();
    let [root, data] = drives.as_slice() else { panic!("two drives") };
    assert_eq!((root.name.as_str(), root.place.line), ("root", 1));
    assert_eq!(root.options.socket.socket_path.as_deref(), Some(Path::new("/etc/root.sock")));
    assert_eq!(root.options.namespaces, ["file:/etc/root.img".parse().unwrap()]);
    assert_eq!(root.options.serial, "ROOT-1");
    assert_eq!((data.name.as_str(), data.place.line), ("data", 7));
    let namespaces = ["file:/etc/data.img,block-size=4096", "ram:1G"];
    assert_eq!(data.options.namespaces, namespaces.map(|spec| spec.parse().unwrap()));
    assert_eq!((data.options.doorbells, data.options.queues), (DoorbellMode::Posted, 8));
}

/// Every option of the command line is a key, with the same default.
#[test]
fn what_is_not_written_is_as_on_the_command_line() {
    use clap::Parser;
    let drives = parse("[[drive]]\nname = 'a'\nsocket-path = '/s'\nnamespace = 'null:1M'").unwrap();
    let arguments =
        ["outboard-server", "nvme", "--name", "a", "--socket-path", "/s", "--namespace", "null:1M"];
    let crate::cli::Command::Nvme(nvme) = crate::cli::Cli::parse_from(arguments).command else {
        panic!("another command");
    };
    assert_eq!(format!("{:?}", drives[0].options), format!("{:?}", nvme.drive));
}

#[test]
fn each_mistake_names_its_line_and_says_what_to_do() {
    let drive =
        |keys: &str| format!("\n[[drive]]\nname = 'a'\n{keys}\nsocket-path = 's'\nnamespace = 'null:1M'\n");
    for (text, line, expected) in [
        (String::new(), 1, "write a [[drive]]"),
        ("[[drive]\n".into(), 1, "expected"),
        ("\n[[drives]]\nname = 'a'".into(), 2, "unknown field `drives`, expected `drive`"),
        ("[drive]\nname = 'a'".into(), 1, "expected a sequence"),
        (drive("qeues = 4"), 4, "Unknown key 'qeues'; the keys of a drive are name, socket-path, "),
        (drive("help = true"), 4, "Unknown key 'help'"),
        (drive("queues = 0"), 4, "invalid value '0' for 'queues': 0 is not in 1..=1024"),
        (drive("queues = 'many'"), 4, "invalid digit"),
        (drive("queues = 1.5"), 4, "'queues' cannot be a fraction; write a string or a number"),
        (drive("queues = [4]"), 4, "'queues' takes one value, not a list"),
        (drive("doorbells = 'rung'"), 4, "[possible values: mapped, whole-bar, posted"),
        (drive("serial = 'äöü'"), 4, "at most 20 printable ASCII characters"),
        (drive("serial = { a = 1 }"), 4, "'serial' cannot be a table"),
        (drive("fd = 7"), 4, "cannot be used with"),
        ("[[drive]]\nname = 'a'\nnamespace = 'null:1M'".into(), 1, "lacks socket-path or fd; write it"),
        ("[[drive]]\nsocket-path = 's'\n".into(), 1, "lacks namespace"),
        ("[[drive]]\nsocket-path = 's'\nnamespace = 'null:1M'".into(), 1, "lacks name;"),
        ("[[drive]]\nname = 'a'\nsocket-path = 's'\nnamespace = ['null:1M',\n 'tape:1']".into(), 4, "tape:1"),
        ("[[drive]]\nname = 'a'\nname = 'b'".into(), 3, "duplicate key"),
    ] {
        let error = parse(&text).expect_err(&text);
        assert!(error.starts_with(&format!("/etc/drives.toml:{line}: ")), "{text}\nis answered: {error}");
        assert!(error.contains(expected) && !error.contains('\n'), "{text}\nis answered: {error}");
    }
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let error = read(Path::new("/nowhere/drives.toml")).unwrap_err().to_string();
    assert!(error.contains("/nowhere/drives.toml cannot be read"), "{error}");
}

#[test]
fn no_drive_takes_what_another_has() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("drives.toml");
    for name in ["image", "other"] {
        fs::write(directory.path().join(name), [0; 512]).unwrap();
    }
    fs::hard_link(directory.path().join("image"), directory.path().join("link")).unwrap();
    std::os::unix::fs::symlink(".", directory.path().join("here")).unwrap();
    let drive = |name: &str, source: &str, namespace: &str| {
        format!("[[drive]]\nname = '{name}'\n{source}\nnamespace = {namespace}\n")
    };
    let first = drive("a", "socket-path = 's'", "'file:image'");
    for (second, expected) in [
        (drive("a", "socket-path = 't'", "'null:1M'"), "The name a belongs to the drive of line 1 already"),
        (drive("b", "socket-path = 's'", "'null:1M'"), "choose another path"),
        (drive("b", "socket-path = 'here/s'", "'null:1M'"), "here/s belongs to the drive of line 1"),
        (drive("b", "socket-path = 't'", "'file:image'"), "image belongs to the drive of line 1"),
        (drive("b", "socket-path = 't'", "'file:link,read-only'"), "add read-only to both"),
        (
            drive("b", "socket-path = 't'", "['file:other', 'file:other']"),
            "other belongs to the drive of line 5",
        ),
        (drive("b", "fd = 7", "'null:1M'") + &drive("c", "fd = 7", "'null:1M'"), "Descriptor 7 belongs"),
    ] {
        let text = first.clone() + &second;
        let error = super::parse(&path, &text).expect_err(&text).to_string();
        assert!(error.contains(expected), "{text}\nis answered: {error}");
    }
    let reading = drive("a", "socket-path = 's'", "'file:image,read-only'")
        + &drive("b", "socket-path = 't'", "'file:link,read-only'");
    assert_eq!(super::parse(&path, &reading).unwrap().len(), 2);
}

/// What docs/operating.md shows is what the program takes and prints.
#[test]
fn the_manual_is_right() {
    use crate::snippet::{Vmm, snippet};
    let manual = include_str!("../../../docs/operating.md");
    let files: Vec<&str> =
        manual.split("```toml\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert!(!files.is_empty());
    for text in files {
        parse(text).unwrap();
    }
    for vmm in [Vmm::Qemu, Vmm::Libvirt, Vmm::CloudHypervisor] {
        let text = snippet(vmm, Some("data"), Path::new("/run/outboard/data.sock")).unwrap();
        assert!(manual.contains(&text), "{text}");
    }
}

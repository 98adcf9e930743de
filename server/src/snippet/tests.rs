use std::process::Command;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

/// The words of a command, as a real shell takes them.
fn words(command: &str) -> Vec<String> {
    let (program, arguments) = command.split_once(' ').unwrap();
    assert!(!program.contains('\''));
    let script = format!("printf '%s\\0' {arguments}");
    let output = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    text.split_terminator('\0').map(Into::into).collect()
}

fn after<'a>(words: &'a [String], option: &str) -> &'a str {
    let at = words.iter().position(|word| word == option).unwrap();
    &words[at + 1]
}

/// The values of the `qemu:arg`s in the place where libvirt looks for them.
fn qemu_arguments(document: &str) -> Vec<String> {
    let document = roxmltree::Document::parse(document).unwrap();
    let domain = document.root_element();
    assert_eq!(domain.tag_name().name(), "domain");
    let access = domain.descendants().find(|node| node.has_tag_name("access")).unwrap();
    assert_eq!(access.parent_element().unwrap().tag_name().name(), "memoryBacking");
    assert_eq!(access.attribute("mode"), Some("shared"));
    let arguments = domain
        .descendants()
        .filter(|node| node.has_tag_name(("http://libvirt.org/schemas/domain/qemu/1.0", "arg")));
    arguments.map(|argument| argument.attribute("value").unwrap().into()).collect()
}

/// Cloud Hypervisor's option parser: commas separate outside of quotes, and quotes are dropped.
fn options(text: &str) -> Vec<(String, String)> {
    let mut parts = vec![String::new()];
    let mut quoted = false;
    for character in text.trim().chars() {
        match character {
            '"' => quoted = !quoted,
            ',' if !quoted => parts.push(String::new()),
            other => parts.last_mut().unwrap().push(other),
        }
    }
    assert!(!quoted);
    parts.iter().map(|part| part.split_once('=').unwrap()).map(|(k, v)| (k.into(), v.trim().into())).collect()
}

fn expected(name: Option<&str>, path: &str) -> Value {
    let mut device = json!({ "driver": "vfio-user-pci", "socket": { "type": "unix", "path": path } });
    if let Some(name) = name {
        device["id"] = name.into();
    }
    device
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever the path is, each VMM is told that path.
    #[test]
    fn a_path_survives_every_quoting(
        rest in "(\\PC|['\"\\\\&<>,=\\[\\]{}$`!\n\t ]){0,20}",
        name in proptest::option::of("[a-z][a-z0-9._-]{0,8}"),
    ) {
        let path = format!("/run/{rest}");
        let name = name.as_deref();
        let qemu = words(&snippet(Vmm::Qemu, name, Path::new(&path)).unwrap());
        let device: Value = serde_json::from_str(after(&qemu, "-device")).unwrap();
        prop_assert_eq!(&device, &expected(name, &path));
        prop_assert!(after(&qemu, "-object").contains("share=on"));
        let libvirt = snippet(Vmm::Libvirt, name, Path::new(&path)).unwrap();
        let arguments = qemu_arguments(&libvirt);
        let device: Value = serde_json::from_str(after(&arguments, "-device")).unwrap();
        prop_assert_eq!(&device, &expected(name, &path));
        match snippet(Vmm::CloudHypervisor, name, Path::new(&path)) {
            Ok(text) => {
                let words = words(&text);
                let told = options(after(&words, "--user-device"));
                let socket = told.iter().find(|(key, _)| key == "socket").unwrap();
                prop_assert_eq!(&socket.1, &path);
                prop_assert_eq!(told.len(), 1 + usize::from(name.is_some()));
            }
            Err(error) => prop_assert!(path.contains(['"', '[', ']']) || path.ends_with(char::is_whitespace), "{error}"),
        }
    }
}

#[test]
fn a_path_that_is_not_text_is_refused() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let path = Path::new(OsStr::from_bytes(b"/run/\xff"));
    for vmm in [Vmm::Qemu, Vmm::Libvirt, Vmm::CloudHypervisor] {
        let error = snippet(vmm, None, path).unwrap_err();
        assert!(error.to_string().contains("UTF-8"), "{error}");
    }
}

/**
 * An answer's text as paragraphs and code blocks. Text becomes text nodes and never HTML.
 */

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;

/**
 * The blocks of a text, which may end anywhere: a code block whose end has not come yet is one already.
 * @param {string} text
 * @returns {{code: boolean, text: string}[]}
 */
export function blocksOf(text) {
  const blocks = [];
  let lines = [];
  let fence = null;

  function close(code) {
    if (code || lines.length) blocks.push({ code, text: lines.join("\n") });
    lines = [];
  }

  for (const line of text.split("\n")) {
    const [, marks, rest] = FENCE.exec(line) ?? [];
    if (fence !== null) {
      if (marks?.startsWith(fence) && !rest.trim()) {
        close(true);
        fence = null;
      } else {
        lines.push(line);
      }
    } else if (marks) {
      close(false);
      fence = marks;
    } else if (line.trim()) {
      lines.push(line);
    } else {
      close(false);
    }
  }
  close(fence !== null);
  return blocks;
}

/**
 * Make the parent show the text. What is there already is kept, so that calling this for every piece of a growing answer is cheap
 * and a reader's selection lasts.
 * @param {Element} parent
 * @param {string} text
 */
export function show(parent, text) {
  const blocks = blocksOf(text);
  blocks.forEach((block, index) => {
    const there = parent.children[index];
    if (there?.tagName === (block.code ? "PRE" : "P")) {
      grow(there.firstChild, block.text);
      return;
    }
    const fresh = element(block);
    if (there) there.replaceWith(fresh);
    else parent.append(fresh);
  });
  while (parent.children.length > blocks.length) parent.lastElementChild.remove();
}

/** What is only added to leaves alone what a reader has selected before it. */
function grow(node, text) {
  if (text === node.data) return;
  if (text.startsWith(node.data)) node.appendData(text.slice(node.data.length));
  else node.data = text;
}

function element(block) {
  const made = document.createElement(block.code ? "pre" : "p");
  made.append(document.createTextNode(block.text));
  if (block.code) {
    made.tabIndex = 0; // wide code is scrolled with the arrow keys
    made.role = "group";
    made.ariaLabel = "Code";
  } else {
    made.dir = "auto";
  }
  return made;
}
